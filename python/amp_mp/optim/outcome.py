"""What a step has come to: the verdict of csrc/core/decide.h, as the host gets to know it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from amp_mp import _C


class StepReport(NamedTuple):
    """One step's outcome."""

    number: int  # of the step, from 1
    skipped: bool  # an inf or NaN was met, nothing was changed
    grad_norm: float | None  # 2-norm of the true gradients before clipping; None if not measured
    max_abs: float | None  # largest finite true |g|; None if not measured
    loss_scale: float  # that the gradients carried


class Outcomes:
    """The outcomes of an optimizer's steps.

    On CUDA the device writes them to host memory (csrc/torch/reports.h), so that one which has
    arrived costs nothing to read, and replays of a captured step are seen as well.
    """

    def __init__(self) -> None:
        """Without any."""
        self.verdict: Tensor | None = None  # of the last step
        self.reports: _C.Reports | None = None
        self._measured = False
        self._count = 0

    def forget(self) -> None:
        """As if no step had been taken."""
        self.verdict = None

    def reports_on(self, device: torch.device) -> _C.Reports | None:
        """Who is to hear of a decision on the device; None on a CPU.

        Raises RuntimeError at the first decision if a CUDA graph is being captured.
        """
        if device.type == "cpu":
            self.reports = None
        elif self.reports is None or self.reports.device != device:
            self.reports = _C.Reports(device)
        return self.reports

    def add(self, verdict: Tensor, measured: bool) -> None:
        """A decision that has been queued, made with reports_on's reports."""
        self.verdict, self._measured = verdict, measured
        self._count += 1

    def newest(self, wait: bool) -> StepReport | None:
        """The last step's; without waiting, the last one that has reached the host."""
        if self.verdict is None:
            return None
        if self.reports is None:
            values = self.verdict.tolist()
            number = self._count
        else:
            found = self.reports.newest(wait)
            if found is None:
                return None
            number, *values = found
        found_inf, _, norm, max_abs, scale = values[: _C.VERDICT_SIZE]
        measured = self._measured
        return StepReport(
            number,
            found_inf != 0,
            norm if measured else None,
            max_abs if measured else None,
            scale,
        )
