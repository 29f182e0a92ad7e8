"""Modules and functions that compute in float32 between low-precision ones, and shape checks."""

from amp_mp.nn.attention import (
    attention,
    attention_weights,
    fp32_log_softmax,
    fp32_softmax,
)
from amp_mp.nn.norms import Fp32GroupNorm, Fp32LayerNorm, Fp32RMSNorm
from amp_mp.nn.shapes import pad_to_multiple, tensor_core_report

__all__ = [
    "Fp32GroupNorm",
    "Fp32LayerNorm",
    "Fp32RMSNorm",
    "attention",
    "attention_weights",
    "fp32_log_softmax",
    "fp32_softmax",
    "pad_to_multiple",
    "tensor_core_report",
]
