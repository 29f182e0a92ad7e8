"""What a step did, as the host learns it: the verdict of csrc/core/decide.h."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.optim.step.capture import is_capturing
from amp_mp.optim.step.decide import new_verdict
from amp_mp.scaling.observe import SkipWarning


class StepReport(NamedTuple):
    """What one step did."""

    number: int  # of the step, from 1
    skipped: bool  # a gradient was inf or NaN, and nothing was changed
    grad_norm: float | None  # 2-norm of the true gradients before clipping; None if not measured
    max_abs: float | None  # largest finite true |g|; None if not measured
    loss_scale: float  # that the gradients carried


class StepLog:
    """The verdicts of an optimizer's steps.

    On CUDA the device writes them to host memory (csrc/torch/step/step_reports.h): a report that
    has arrived costs nothing to read, and replays of a captured step are reported as well.
    """

    def __init__(self) -> None:
        self.count = 0  # steps queued so far
        self.verdict: Tensor | None = None  # of the last step
        self.reports: _C.StepReports | None = None
        self._measured = False  # whether the last step read the gradients
        self._memory: Tensor | None = None
        self._skipped = 0  # steps in a row, on a CPU
        self._warning = SkipWarning()

    def forget(self) -> None:
        """Forgets the last step; its memory is kept for the next one."""
        self.verdict = None

    def verdict_on(self, device: torch.device) -> Tensor:
        """The tensor for the next verdict: the same at every step, which saves an allocation."""
        if self._memory is None or self._memory.device != device:
            self._memory = new_verdict(device)
        return self._memory

    def reports_on(self, device: torch.device) -> _C.StepReports | None:
        """Where the device reports its decisions; None on a CPU.

        Raises RuntimeError at the first decision if a CUDA graph is being captured.
        """
        if device.type == "cpu":
            self.reports = None
        elif self.reports is None or self.reports.device != device:
            self.reports = _C.StepReports(device)
        return self.reports

    def add(self, verdict: Tensor, measured: bool) -> None:
        """Adds a decision that was queued with the reports of reports_on."""
        self.verdict, self._measured = verdict, measured
        self.count += 1

    def warn_of_skips(self, name: str, describe: Callable[[float], str]) -> None:
        """Warns where steps are skipped again and again, from reports that are here; never waits.

        Call it once after every step that could be skipped. name: the optimizer's. describe: says
        which gradients are inf or NaN, given the scale they carry.
        """
        if self.verdict is None or is_capturing(self.verdict.device):
            return
        if self.reports is None:
            found_inf, *_, scale = self.verdict.tolist()
            if not found_inf:
                self._skipped = 0
                return
            self._skipped += 1
            step = self.count
        else:
            found = self.reports.newest(wait=False)
            if found is None:
                return
            step, *_, scale, _, self._skipped = found
        self._warning.count(name, step, self._skipped, lambda: describe(scale))

    def newest(self, wait: bool) -> StepReport | None:
        """The last step's report; without waiting, the last one that has reached the host."""
        if self.verdict is None:
            return None
        found = self.reports.newest(wait) if self.reports else (self.count, *self.verdict.tolist())
        if found is None:
            return None
        number, found_inf, _, norm, max_abs, scale, *_ = found
        if not self._measured:
            norm = max_abs = None
        return StepReport(number, found_inf != 0, norm, max_abs, scale)


class ReportsSteps(ABC):
    """What an optimizer tells about its last step."""

    @property
    @abstractmethod
    def log(self) -> StepLog:
        """The verdicts of the steps."""

    def last_report(self, wait: bool = False) -> StepReport | None:
        """What the last step did: number, skipped, grad_norm, max_abs, loss_scale; None before it.

        wait: wait for the device until the last step's report is on the host. Otherwise the report
        is of the last step that has arrived there.
        """
        return self.log.newest(wait)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step (with release=True, any parameter) was skipped; waits for it."""
        report = self.last_report(wait=True)
        return report is not None and report.skipped

    @property
    def grad_norm(self) -> float | None:
        """2-norm of the last step's true gradients (unscaled, before clipping); waits for the step.

        inf after an overflow; None where the gradients were not measured.
        """
        report = self.last_report(wait=True)
        return report.grad_norm if report is not None else None
