"""From measured gradients to what a step does: the verdict tensor of csrc/core/decide.h."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_mp import _C


def decide(
    device: torch.device,
    statistics: list[Tensor] | None,
    *,
    scale: Tensor | float | None = None,
    found_inf: Tensor | float | None = None,
    max_norm: float | None = None,
) -> Tensor:
    """A verdict, float64 [_C.VERDICT_SIZE], on the device, without waiting for it.

    Args:
        device: where.
        statistics: of _C.measure, one a device; only their last rows count. None: not measured.
        scale: the loss scale the gradients carry; None for 1.
        found_inf: another's verdict, not 0 for an overflow.
        max_norm: the norm to clip to; None for no clipping.
    """
    total = None
    if statistics:
        total = statistics[0]
        if len(statistics) > 1:  # parameters on several devices: one norm, one verdict
            rows = torch.stack([s[-1].to(device) for s in statistics])
            total = torch.stack([rows[:, 0].sum(), rows[:, 1].max(), rows[:, 2].sum()])
    verdict = torch.empty(_C.VERDICT_SIZE, dtype=torch.float64, device=device)
    _C.decide_(
        verdict,
        statistics=total,
        scale=scalar(scale, device),
        found_inf=scalar(found_inf, device),
        max_norm=max_norm or 0.0,
    )
    return verdict


def scalar(value: Tensor | float | None, device: torch.device) -> Tensor | None:
    """A scaler's number as a float32 tensor on the device, or None."""
    if value is None:
        return None
    return torch.as_tensor(value, dtype=torch.float32, device=device).reshape(())
