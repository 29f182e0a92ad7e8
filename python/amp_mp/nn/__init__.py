"""Modules and functions that compute in float32 between low-precision ones, and size checks.

`functional.linear_accumulate` and `attach_main_grads`: gradients that add up in float32.
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
