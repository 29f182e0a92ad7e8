"""amp_mp: mixed-precision training for PyTorch.

Train in float16 or bfloat16 and get float32's result: float32 masters, loss scaling, and optimizers
that unscale, clip, update and cast in one native pass, on CPU and CUDA.

    import amp_mp as amp

    model = amp.prepare(model, torch.bfloat16)
    optimizer = amp.optim.AdamW(model.parameters(), lr=3e-4, max_grad_norm=1.0)
"""

# ruff: noqa: E402 (the library is loaded after the check of torch's version)

import torch

from amp_mp._version import __version__


def _check_torch() -> None:
    """Raises ImportError where the library was built for another torch, in which it would crash."""
    try:
        from amp_mp import _built_for
    except ImportError as error:
        raise ImportError(
            "amp_mp's native library is not built here. Build it, with torch installed, by\n"
            "    pip install --no-build-isolation amp_mp\n"
            "or, in a checkout, pip install --no-build-isolation -e ."
        ) from error
    built, running = _built_for.TORCH_VERSION, torch.__version__
    if built.split(".")[:2] != running.split(".")[:2]:
        raise ImportError(
            f"amp_mp was built for torch {built}, but torch {running} is running. Rebuild it by\n"
            "    pip install --no-build-isolation --force-reinstall --no-deps amp_mp"
        )


_check_torch()

from amp_mp import checkpoint, compat, diagnose, formats, nn, optim, scaling
from amp_mp._C import build_info
from amp_mp.apex.fp16_optimizer import FP16_Optimizer
from amp_mp.apex.fp16_utils import (
    BN_convert_float,
    master_params,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    tofp16,
)
from amp_mp.apex.handle import init
from amp_mp.casting.autocast import autocast, backward, clear_cache, disable_casts
from amp_mp.casting.explain import explain
from amp_mp.casting.functions import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from amp_mp.casting.op_table import policies, set_policy, uninstall
from amp_mp.compat.openseq2seq import MixedPrecisionOptimizerWrapper, mixed_precision
from amp_mp.compat.regularizers import l1, l2_half, l2_sum, mp_regularizer_wrapper
from amp_mp.compat.shift_for_scale import shift_for_scale
from amp_mp.compat.typed_tensor import TypedTensor
from amp_mp.grad_scaler.grad_scaler import GradScaler
from amp_mp.model.averaged_model import AveragedModel
from amp_mp.model.convert import convert_network, prepare
from amp_mp.model.float32_state_dict import float32_state_dict, load_float32_state_dict
from amp_mp.model.selection import keep_fp32
from amp_mp.nn import attach_main_grads

# Two names that `scaling` had before they moved to packages that it must not import.
scaling.GradScaler = GradScaler  # type: ignore[attr-defined]
scaling.shift_for_scale = shift_for_scale  # type: ignore[attr-defined]

# fmt: off
__all__ = [
    "AveragedModel", "BN_convert_float", "FP16_Optimizer", "GradScaler",
    "MixedPrecisionOptimizerWrapper",
    "TypedTensor", "__version__", "attach_main_grads", "autocast", "backward", "build_info",
    "checkpoint", "clear_cache", "compat", "convert_network", "diagnose", "disable_casts",
    "explain",
    "float32_state_dict", "float_function", "formats", "half_function", "init", "keep_fp32", "l1",
    "l2_half", "l2_sum", "load_float32_state_dict", "master_params",
    "master_params_to_model_params", "mixed_precision", "model_grads_to_master_grads",
    "mp_regularizer_wrapper", "network_to_half", "nn", "optim", "policies", "prep_param_lists",
    "prepare", "promote_function", "register_float_function", "register_half_function",
    "register_promote_function", "scaling", "set_policy", "tofp16", "uninstall",
]
