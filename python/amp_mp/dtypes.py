"""The dtypes that amp_mp works with, and rounding to the low-precision ones."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

LOW_PRECISION = (torch.float16, torch.bfloat16)
NATIVE = (torch.float32, *LOW_PRECISION)  # what the native passes read and write


def check_dtype(found: Any, choices: Sequence[torch.dtype], argument: str = "dtype") -> None:
    """Raises ValueError, naming the argument, for anything but one of these dtypes."""
    if found in choices:
        return
    *others, last = map(str, choices)
    name = f"the string {found!r}" if isinstance(found, str) else str(found)
    remedy = f": write torch.{found}" if f"torch.{found}" in (*others, last) else ""
    known = f"{', '.join(others)} or {last}" if others else last
    raise ValueError(f"{argument} must be {known}, found {name}{remedy}")


def check_choice(name: str, found: Any, known: Collection[str]) -> None:
    """Raises ValueError naming the argument and what it may be."""
    if found not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}; found {found!r}")


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 tensor in another dtype: nearest even, float16 clamped to +-65504, NaN kept."""
    limit = torch.finfo(dtype).max if dtype == torch.float16 else math.inf
    return value.clamp(-limit, limit).to(dtype)
