"""From measured gradients to what a step does: the verdict tensor of csrc/core/decide.h."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp_mp import _C


def new_verdict(device: torch.device) -> Tensor:
    """A verdict to be filled, float64 [_C.VERDICT_SIZE]."""
    return torch.empty(_C.VERDICT_SIZE, dtype=torch.float64, device=device)


def terms(
    device: torch.device,
    *,
    scale: Tensor | float | None = None,
    found_inf: Tensor | float | None = None,
    max_norm: float | None = None,
    next_scale: _C.ScaleMove | None = None,
    reports: _C.Reports | None = None,
) -> _C.Terms:
    """On which terms a step on the device is decided.

    Args:
        device: where.
        scale: the loss scale the gradients carry; None for 1.
        found_inf: another's verdict, not 0 for an overflow.
        max_norm: the norm to clip to; None for no clipping.
        next_scale: how the loss scale is to move on.
        reports: who is to hear of it.
    """
    carried, found = scalar(scale, device), scalar(found_inf, device)
    return _C.Terms(carried, found, max_norm or 0.0, next_scale, reports)


def decide(device: torch.device, statistics: Sequence[Tensor] | None, on: _C.Terms) -> Tensor:
    """A verdict, float64 [_C.VERDICT_SIZE], on the device, without waiting for it.

    Args:
        device: where.
        statistics: of _C.measure, one a device; only their last rows count. None: not measured.
        on: the terms.
    """
    total = None
    if statistics:
        total = statistics[0]
        if len(statistics) > 1:  # parameters on several devices: one norm, one verdict
            rows = torch.stack([s[-1].to(device) for s in statistics])
            total = torch.stack([rows[:, 0].sum(), rows[:, 1].max(), rows[:, 2].sum()])
    verdict = new_verdict(device)
    _C.decide_(verdict, on, total)
    return verdict


def scalar(value: Tensor | float | None, device: torch.device) -> Tensor | None:
    """A scaler's number as a float32 tensor on the device, or None."""
    if value is None:
        return None
    return torch.as_tensor(value, dtype=torch.float32, device=device).reshape(())
