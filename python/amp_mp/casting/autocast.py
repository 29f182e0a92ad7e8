"""Regions in which torch casts. Switching on and off, dtype and nesting are torch's own."""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from amp_mp.casting.op_table import check_device, install_default
from amp_mp.casting.step_hooks import install_step_hooks
from amp_mp.dtypes import LOW_PRECISION


def autocast(
    device_type: str | None = None,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> torch.autocast:
    """A torch.autocast, which checkpoint, compile and DDP understand.

    The first one in a process puts the "torch" table in force, if no table is: torch's own lists,
    and a cache of weight casts that outlives the region. Call it before worker threads run.

    Args:
        device_type: "cuda" or "cpu"; default: "cuda" where there is one.
        dtype: torch.float16 or torch.bfloat16; default: float16 on CUDA, bfloat16 on a CPU.
        enabled: False for a region without casts.
        cache_enabled: whether a weight is cast once a region; default: as outside.

    Raises:
        ValueError: another device type or dtype.
    """
    device, low = resolve(device_type, dtype)
    if enabled and not torch.compiler.is_compiling():
        install_step_hooks()
        install_default("torch", device)
    return torch.autocast(device, dtype=low, enabled=enabled, cache_enabled=cache_enabled)


def disable_casts(device_type: str | None = None) -> torch.autocast:
    """A region without casts on the device type."""
    return torch.autocast(resolve(device_type, None)[0], enabled=False)


def backward(loss: Tensor, **kwargs: Any) -> None:
    """loss.backward(**kwargs) with casts off, for training under amp.init without loss scaling.

    Backward must run as the graph was recorded. With casts on, the products in the backward pass
    of what was computed in float32 would run in low precision: gradients off by 1e-3. scale_loss
    does the same.
    """
    with disable_casts(loss.device.type):
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]


def resolve(device_type: str | None, dtype: torch.dtype | None) -> tuple[str, torch.dtype]:
    """The device type and low precision of a region; ValueError naming a wrong argument."""
    device = check_device(device_type, "device_type")
    low = dtype or (torch.float16 if device == "cuda" else torch.bfloat16)
    if low not in LOW_PRECISION:
        raise ValueError(f"dtype must be torch.float16 or torch.bfloat16, found {dtype}")
    if device == "cpu" and low == torch.float16:
        _warn_slow()
    return device, low


@functools.cache
def _warn_slow() -> None:
    """Warns once per process."""
    warnings.warn(
        "amp_mp: float16 on a CPU is 3 to 100 times slower than float32; it is of use for testing. "
        "bfloat16 is fast there",
        stacklevel=4,
    )
