"""Modules and functions that compute in float32 between low-precision ones, and size checks.

`float32_layers` has norms, softmax and attention. `functional.linear_accumulate` and
`attach_main_grads` add up gradients in float32. `tensor_core_report` lists matrix sizes that waste
Tensor Cores.
"""

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
from amp_mp.nn.tensor_core_report import pad_to_multiple, tensor_core_report

# fmt: off
__all__ = [
    "Fp32GroupNorm", "Fp32LayerNorm", "Fp32RMSNorm", "MainGrads", "attach_main_grads", "attention",
    "attention_weights", "fp32_log_softmax", "fp32_softmax", "functional", "pad_to_multiple",
    "tensor_core_report",
]
