"""float32 values of parameters that have been rounded, kept for the optimizer's masters."""

from __future__ import annotations

import math
from collections.abc import MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

LOW_PRECISION = (torch.float16, torch.bfloat16)

# The values, and the parameter's version counter.
_originals: MutableMapping[Tensor, tuple[Tensor, int]] = WeakTensorKeyDictionary()


def keep_original(param: Tensor) -> None:
    """Keeps a float32 parameter's values; call it before they are rounded, by replacing `.data`."""
    _originals[param] = param.detach(), param._version


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 tensor as a weight of the dtype: nearest even, float16 saturating, NaN staying."""
    limit = torch.finfo(dtype).max if dtype == torch.float16 else math.inf
    return value.clamp(-limit, limit).to(dtype)


def take_original(param: Tensor) -> Tensor:
    """A new float32 master for a low-precision parameter, same shape, layout and device.

    The exact original if `prepare` has kept one and the parameter has not been written since. It is
    not enough that it has the same value: DDP sends the rounded weights of rank 0 to all, and would
    leave the original to rank 0 alone, whose masters would part from the others'.
    """
    original, version = _originals.pop(param, (None, 0))
    if original is not None and original.shape == param.shape and param._version == version:
        master = torch.empty_like(param, dtype=torch.float32, memory_format=torch.preserve_format)
        master.copy_(original)
        if torch.equal(rounded(master, param.dtype), param.detach()):
            return master
    return param.detach().to(torch.float32, memory_format=torch.preserve_format, copy=True)
