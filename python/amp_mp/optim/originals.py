"""float32 values of parameters that have been rounded, kept for the optimizer's masters."""

from __future__ import annotations

import math
from collections.abc import MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

LOW_PRECISION = (torch.float16, torch.bfloat16)

_originals: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()


def keep_original(param: Tensor) -> None:
    """Keeps a float32 parameter's values; call it before they are rounded."""
    _originals[param] = param.detach()


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 tensor as a weight of the dtype: nearest even, float16 saturating, NaN staying."""
    limit = torch.finfo(dtype).max if dtype == torch.float16 else math.inf
    return value.clamp(-limit, limit).to(dtype)


def take_original(param: Tensor) -> Tensor:
    """A new float32 master for a low-precision parameter, same shape, layout and device.

    The exact original if `prepare` has kept one and the parameter still is its rounded value.
    """
    original = _originals.pop(param, None)
    if original is not None and original.shape == param.shape:
        master = torch.empty_like(param, dtype=torch.float32, memory_format=torch.preserve_format)
        master.copy_(original)
        if torch.equal(rounded(master, param.dtype), param.detach()):
            return master
    return param.detach().to(torch.float32, memory_format=torch.preserve_format, copy=True)
