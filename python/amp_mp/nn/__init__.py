"""Modules and functions that compute in float32 between low-precision ones.

`float32_layers` has norms, softmax and attention. `functional.linear_accumulate` and
`attach_main_grads` add up gradients in float32. `tensor_core_report` of `amp_mp.diagnose` has its
older name here, too.
"""

import importlib
from typing import TYPE_CHECKING, Any

from amp_mp.nn import functional
from amp_mp.nn.float32_layers import (
    Fp32GroupNorm,
    Fp32LayerNorm,
    Fp32RMSNorm,
    attention,
    attention_weights,
    fp32_log_softmax,
    fp32_softmax,
)
from amp_mp.nn.main_grads import MainGrads, attach_main_grads

if TYPE_CHECKING:
    from amp_mp.diagnose.matrix_sizes import pad_to_multiple, tensor_core_report

# fmt: off
__all__ = [
    "Fp32GroupNorm", "Fp32LayerNorm", "Fp32RMSNorm", "MainGrads", "attach_main_grads", "attention",
    "attention_weights", "fp32_log_softmax", "fp32_softmax", "functional", "pad_to_multiple",
    "tensor_core_report",
]


def __getattr__(name: str) -> Any:
    """Imports amp_mp.diagnose only where one of its two names is asked for."""
    if name in ("pad_to_multiple", "tensor_core_report"):
        return getattr(importlib.import_module("amp_mp.diagnose"), name)
    raise AttributeError(f"module 'amp_mp.nn' has no attribute {name!r}")
