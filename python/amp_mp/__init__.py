"""amp_mp: mixed-precision training for PyTorch.

Float32 masters, loss scaling, and optimizers that unscale, clip, update and cast in one native
pass, on CPU and CUDA, so that float16 and bfloat16 get float32's result.

    import amp_mp as amp

    model = amp.prepare(model, torch.bfloat16)
    optimizer = amp.optim.AdamW(model.parameters(), lr=3e-4, max_grad_norm=1.0)

Eight names are enough for most scripts:

    prepare         a model's weights to bfloat16 or float16, with float32 masters
    optim           the optimizers
    GradScaler      the loss scale of float16 weights, as torch.amp's
    autocast        float32 weights, and products in low precision in a block
    init            the same everywhere, with scale_loss
    FP16_Optimizer  float32 masters around any optimizer
    AveragedModel   averages of the masters
    checkpoint      model and optimizer in one directory, for any number of processes
"""

# ruff: noqa: E402 (the library is loaded after the check of torch's version)

import importlib
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from amp_mp._version import __version__


def _choose_binding() -> None:
    """Lets `amp_mp._C` be found in the folder of the running torch, since another would crash.

    Raises:
        ImportError: native/ has no binding for this version of torch and of Python.
    """
    if "t" in sys.abiflags:
        raise ImportError(
            f"amp_mp is not tested in free-threaded Python, and {sys.executable} is one; use an "
            "ordinary build of Python"
        )
    native = Path(__file__).parent / "native"
    found = {path.parent.name for path in native.glob(f"torch*/_C{EXTENSION_SUFFIXES[0]}")}
    running = "torch{}_{}".format(*torch.__version__.split(".")[:2])
    if running in found:
        return __path__.append(str(native / running))
    versions = sorted(name.removeprefix("torch").replace("_", ".") for name in found)
    raise ImportError(
        f"amp_mp {__version__} in {native.parent} has a native library for torch "
        f"{', '.join(versions) or '(none)'}, but torch {torch.__version__} is running, in Python "
        f"{sys.version.split()[0]}. Install one of these versions of torch; or, with "
        "torch>=2.11,<2.16, build the library for it in the folder of amp_mp's source:\n"
        "    pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps ."
    )


_choose_binding()

import amp_mp.python_functions  # noqa: F401 (binds what native code calls)
from amp_mp import casting, checkpoint, formats, nn, optim, scaling
from amp_mp.casting.autocast import autocast
from amp_mp.casting.op_table import explain, policies, set_policy
from amp_mp.grad_scaler.grad_scaler import GradScaler
from amp_mp.model.apply_changes import apply_changes
from amp_mp.model.averaged_model import AveragedModel
from amp_mp.model.changes import Changes
from amp_mp.model.convert import prepare
from amp_mp.model.float8 import Float8, float8_of, float8_weights, float32_of_float8
from amp_mp.model.float32_state_dict import (
    float32_of,
    float32_state_dict,
    load_float32_state_dict,
)
from amp_mp.model.pieces import Piece
from amp_mp.model.selection import keep_fp32
from amp_mp.nn.main_grads import attach_main_grads
from amp_mp.optim.state.kept_masters import drop_masters
from amp_mp.switch import build_info
from amp_mp.wrappers.fp16_optimizer import FP16_Optimizer
from amp_mp.wrappers.handle import init

if TYPE_CHECKING:
    from amp_mp import apex, compat, diagnose, integrations

# fmt: off
__all__ = [
    "AveragedModel", "Changes", "FP16_Optimizer", "Float8", "GradScaler", "Piece",
    "__version__", "apex",
    "apply_changes", "attach_main_grads", "autocast", "build_info", "casting", "checkpoint",
    "compat", "diagnose", "drop_masters", "explain", "float8_of", "float8_weights", "float32_of",
    "float32_of_float8", "float32_state_dict", "formats", "init", "integrations", "keep_fp32",
    "load_float32_state_dict", "nn", "optim", "policies", "prepare", "scaling", "set_policy",
]
# Packages with names that users may look for at the top; the error then says where they are.
_PLACES = (
    "casting", "nn", "optim", "scaling", "compat", "apex.amp", "apex.fp16_utils",
    "apex.normalization", "apex.optimizers", "apex.parallel", "apex.multi_tensor_apply",
    "apex.contrib.clip_grad", "apex.contrib.xentropy",
)
# fmt: on

_LAZY = ("apex", "compat", "diagnose", "integrations")  # imported when they are used
_HANDLE = "the method of the handle that amp_mp.init returns; amp_mp.apex.amp has Apex's"
_ELSEWHERE = {
    "initialize": "amp_mp.init for casts in operators, or amp_mp.prepare for low precision; "
    "amp_mp.apex.amp has Apex's",
    "scale_loss": _HANDLE,
    "wrap_optimizer": _HANDLE,
}


def __getattr__(name: str) -> Any:
    """Imports what is lazy; says where another name is."""
    if name in _LAZY:
        return importlib.import_module(f"amp_mp.{name}")
    place = _ELSEWHERE.get(name)
    for folder in () if place or name.startswith("_") else _PLACES:
        if name in importlib.import_module(f"amp_mp.{folder}").__all__:
            place = place or f"amp_mp.{folder}.{name}"
    hint = f"; use {place}" if place else ""
    raise AttributeError(f"module 'amp_mp' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return __all__
