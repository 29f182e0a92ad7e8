"""From measured gradients to a verdict: the tensor of csrc/core/decide.h."""

from collections.abc import Sequence

import torch
from torch import Tensor

from amp_mp import _C


def new_verdict(device: torch.device) -> Tensor:
    """An empty verdict, float64 [_C.VERDICT_SIZE]."""
    return torch.empty(_C.VERDICT_SIZE, dtype=torch.float64, device=device)


def decide_inputs(
    device: torch.device,
    *,
    scale: Tensor | float | None = None,
    found_inf: Tensor | float | None = None,
    max_norm: float | None = None,
    scale_update: _C.ScaleUpdate | None = None,
    reports: _C.StepReports | None = None,
) -> _C.DecideInputs:
    """The inputs of a decision on the device, besides statistics: see Handed; reports: StepLog."""
    scale, found_inf = as_scalar(scale, device), as_scalar(found_inf, device)
    return _C.DecideInputs(scale, found_inf, max_norm or 0.0, scale_update, reports)


def decide(
    device: torch.device, statistics: Sequence[Tensor] | None, inputs: _C.DecideInputs
) -> Tensor:
    """A verdict, float64 [_C.VERDICT_SIZE], on the device, without waiting for it.

    statistics: results of _C.measure, one per device; only their last rows are used. None or empty:
    the gradients were not measured.
    """
    total = None
    if statistics:
        total = statistics[0]
        if len(statistics) > 1:  # parameters on several devices have one norm and one verdict
            rows = torch.stack([s[-1].to(device) for s in statistics])
            total = torch.stack([rows[:, 0].sum(), rows[:, 1].max(), rows[:, 2].sum()])
    verdict = new_verdict(device)
    _C.decide_(verdict, inputs, total)
    return verdict


def as_scalar(value: Tensor | float | None, device: torch.device) -> Tensor | None:
    """A scaler's number as a float32 tensor [] on the device, or None."""
    if value is None:
        return None
    if isinstance(value, Tensor) and value.dtype == torch.float32 and value.device == device:
        return value
    return torch.as_tensor(value, dtype=torch.float32, device=device).reshape(())
