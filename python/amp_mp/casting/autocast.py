"""Regions in which torch casts, or does not."""

from typing import Any

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.casting import op_table
from amp_mp.casting.op_table import table_of
from amp_mp.casting.products import choose_products
from amp_mp.casting.step_hooks import install_step_hooks
from amp_mp.dtypes import LOW_PRECISION, check_dtype
from amp_mp.switch import ENABLED


def autocast(
    device_type: str | None = None,
    dtype: torch.dtype | None = None,
    enabled: bool = ENABLED,
    cache_enabled: bool | None = None,
    *,
    keep_casts: bool = False,
) -> torch.autocast:
    """A torch.autocast, which checkpoint, compile and DDP understand.

    The first one in a process puts the "torch" table in force, if no table is: torch's own lists,
    and a cache of weight casts that notices writes inside the region. Call it before worker threads
    run. Raises ValueError for another device type or dtype.

    device_type: "cuda" or "cpu"; default: "cuda" where there is one. dtype: torch.float16 or
    torch.bfloat16; default: float16 on CUDA, bfloat16 on a CPU. enabled: False for a region without
    casts (default under AMP_MP=0). cache_enabled: cast a weight once a region; default: as outside.
    keep_casts: True keeps the casts of weights for the next region, and amp_mp's optimizers write
    them: a training step then casts no weight. Only if nothing writes weights through `.data`,
    `out=p.data`, NumPy or DLPack, or amp.casting.clear_cache() is called after it. False: as
    outside; in the outermost region the casts end with the region, as torch's do.
    """
    device, low = resolve(device_type, dtype)
    compiling = torch.compiler.is_compiling()
    if enabled and not compiling:
        install_step_hooks()
        if table_of(device, None) is None:
            op_table.install("torch", device)
        if device == "cpu":
            choose_products("auto", low)
    region = _KeepingCasts if keep_casts and not compiling else torch.autocast
    return region(device, dtype=low, enabled=enabled, cache_enabled=cache_enabled)


class _KeepingCasts(torch.autocast):
    def __enter__(self) -> Any:
        self._kept_before = _C.casting.set_keeps_casts(True)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> Any:
        _C.casting.set_keeps_casts(self._kept_before)
        return super().__exit__(*error)


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


def clear_cache() -> None:
    """Drops all cached casts of weights; call it after writes through `.data`, NumPy or DLPack."""
    _C.casting.clear_cache()


def resolve(device_type: str | None, dtype: torch.dtype | None) -> tuple[str, torch.dtype]:
    """The device type and low precision of a region; ValueError naming a wrong argument."""
    device = op_table.check_device(device_type, "device_type")
    low = dtype or (torch.float16 if device == "cuda" else torch.bfloat16)
    check_dtype(low, LOW_PRECISION)
    return device, low
