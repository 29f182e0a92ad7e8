"""amp_mp: mixed-precision training for PyTorch.

Float32 masters, loss scaling, and optimizers that unscale, clip, update and cast in one native
pass, on CPU and CUDA, so that float16 and bfloat16 get float32's result.

    import amp_mp as amp

    model = amp.prepare(model, torch.bfloat16)
    optimizer = amp.optim.AdamW(model.parameters(), lr=3e-4, max_grad_norm=1.0)
"""

# ruff: noqa: E402 (the library is loaded after the check of torch's version)

import importlib
from typing import TYPE_CHECKING, Any

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

from amp_mp import apex, casting, checkpoint, formats, nn, optim, scaling
from amp_mp._C import build_info
from amp_mp.apex.fp16_optimizer import FP16_Optimizer
from amp_mp.apex.handle import init
from amp_mp.casting.autocast import autocast
from amp_mp.casting.op_table import explain, policies, set_policy
from amp_mp.grad_scaler.grad_scaler import GradScaler
from amp_mp.model.averaged_model import AveragedModel
from amp_mp.model.convert import prepare
from amp_mp.model.float32_state_dict import float32_state_dict, load_float32_state_dict
from amp_mp.model.selection import keep_fp32
from amp_mp.nn import attach_main_grads

if TYPE_CHECKING:
    from amp_mp import compat, diagnose

# fmt: off
__all__ = [
    "AveragedModel", "FP16_Optimizer", "GradScaler", "__version__", "apex", "attach_main_grads",
    "autocast", "build_info", "casting", "checkpoint", "compat", "diagnose", "explain",
    "float32_state_dict", "formats", "init", "keep_fp32", "load_float32_state_dict", "nn", "optim",
    "policies", "prepare", "scaling", "set_policy",
]
# fmt: on

_COMPAT = (
    "MixedPrecisionOptimizerWrapper TypedTensor l1 l2_half l2_sum mixed_precision "
    "mp_regularizer_wrapper set_layer_types shift_for_scale"
)
_HANDLE = "the method of the handle that amp_mp.init returns"
# Where the names are that one may look for at the top: this package's others, and Apex's.
_ELSEWHERE = {
    "initialize": "amp_mp.init for casts in operators, or amp_mp.prepare for low-precision weights",
    "scale_loss": _HANDLE,
    "wrap_optimizer": _HANDLE,
    **{name: f"amp_mp.compat.{name}" for name in _COMPAT.split()},
}
for _package in (apex, casting, nn, optim, scaling):
    _ELSEWHERE |= {name: f"{_package.__name__}.{name}" for name in _package.__all__}


def __getattr__(name: str) -> Any:
    """Imports compat and diagnose when they are used; says where another name is."""
    if name in ("compat", "diagnose"):
        return importlib.import_module(f"amp_mp.{name}")
    hint = f"; use {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
    raise AttributeError(f"module 'amp_mp' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return __all__
