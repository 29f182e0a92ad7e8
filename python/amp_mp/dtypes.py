"""The dtypes that amp_mp works with, and rounding to the low-precision ones."""

import math

import torch
from torch import Tensor

LOW_PRECISION = (torch.float16, torch.bfloat16)
NATIVE = (torch.float32, *LOW_PRECISION)  # what the native passes read and write


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 tensor in another dtype: nearest even, float16 clamped to +-65504, NaN kept."""
    limit = torch.finfo(dtype).max if dtype == torch.float16 else math.inf
    return value.clamp(-limit, limit).to(dtype)
