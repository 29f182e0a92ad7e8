"""Modules and functions that compute in float32 between low-precision ones.

`float32_layers` has norms, softmax and attention. `functional.linear_accumulate` adds up a weight's
gradients in float32; `main_grads` does so for a whole model, as `amp_mp.attach_main_grads`.
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

# fmt: off
__all__ = [
    "Fp32GroupNorm", "Fp32LayerNorm", "Fp32RMSNorm", "attention", "attention_weights",
    "fp32_log_softmax", "fp32_softmax", "functional",
]
