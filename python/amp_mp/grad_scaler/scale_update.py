"""Where a GradScaler's scale and its other numbers are written after an iteration.

Where a step computes the next numbers (`Start`, `for_step`, `stepped`, `take`: 60 lines), `update`
launches nothing on CUDA: an iteration has three launches, else four. `_in_graph = True` turns that
off. If then an iteration of `scaled` in benchmarks/torch_pipeline.py, with one small parameter on a
GPU, takes less than 3 % longer, these lines should go, and docs/cuda.md should count four launches.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_mp import _C
from amp_mp.optim.step.cuda_graphs import is_capturing
from amp_mp.optim.step.overflow_report import describe_nonfinite
from amp_mp.scaling.overflows import OverflowWatch
from amp_mp.scaling.policies import ScalePolicy


class ScaleNumbers(NamedTuple):
    """A scaler's scale, and what tells how it moves."""

    scale: Tensor
    tracker: Tensor  # torch's growth tracker, or the policy's state where there is a policy
    policy: ScalePolicy | None
    settings: dict[str, Any]  # torch's, by name

    def update_to(self, scale: Tensor, tracker: Tensor) -> _C.ScaleUpdate:
        """The native update from these tensors to others like them, or to themselves."""
        if self.policy is not None:
            return _C.ScaleUpdate(policy=self.tracker, policy_out=tracker, scale_out=scale)
        old: dict[str, Any] = {"scale": self.scale, "tracker": self.tracker}
        return _C.ScaleUpdate(**old, scale_out=scale, tracker_out=tracker, **self.settings)


Pair = tuple[Tensor, Tensor]  # a scale and a tracker


class Start:
    """The numbers that an update starts from, and whether anything else has written them since."""

    def __init__(self, numbers: ScaleNumbers) -> None:
        self._settings = dict(numbers.settings)
        self._pair = numbers.scale, numbers.tracker
        self._stamps = [_C.Stamp(tensor) for tensor in self._pair]

    def still(self, numbers: ScaleNumbers) -> bool:
        """Whether the numbers are the same tensors with the same values."""
        now = numbers.scale, numbers.tracker
        same = all(a is b for a, b in zip(self._pair, now, strict=True))
        unwritten = (s.still(t) for s, t in zip(self._stamps, now, strict=True))
        return same and self._settings == numbers.settings and all(unwritten)


class ScaleUpdates:
    """Updates a GradScaler's numbers once per iteration; `numbers` gives them as they are now.

    The step of one optimizer computes, in the same launch, what the numbers will be if no other
    optimizer takes part in the iteration; `update` then only exchanges the tensors. Otherwise it
    writes the numbers in place, and always once a CUDA graph was captured that reads the scale,
    since its replays read one address.
    """

    def __init__(self, numbers: Callable[[], ScaleNumbers]) -> None:
        self._numbers = numbers
        self._spare: Pair | None = None  # where a step writes the next numbers
        # Native updates of the last two iterations, with their tensors: as long as these are
        # referenced, no other tensor gets the same id.
        self._known: dict[tuple[float, ...], tuple[Pair, Pair, _C.ScaleUpdate]] = {}
        self._start: Start | None = None  # of the update that a step was given
        self._is_ahead = False  # whether the step has computed the numbers in `_spare`
        self._reports: _C.StepReports | None = None  # where the newest numbers are reported
        self._own: _C.StepReports | None = None  # of updates in place
        self._in_graph = False  # whether a CUDA graph reads the scale
        self._watch = OverflowWatch()

    def forget(self) -> None:
        """Drops numbers computed ahead: the scale was set by hand, or the step did not run."""
        self._start = self._reports = None
        self._is_ahead = False

    def is_read(self, device: torch.device) -> None:
        """Call it wherever the scale on this device is read: remembers captures."""
        # Compiled code may be captured later without asking again.
        if device.type == "cuda" and (torch.compiler.is_dynamo_compiling() or is_capturing(device)):
            self._in_graph = True

    def for_step(self) -> _C.ScaleUpdate | None:
        """The update that the step of an iteration's only optimizer computes; None: none does."""
        numbers = self._numbers()
        self._start = None
        self._is_ahead = False
        if self._in_graph:
            return None
        self._make_reports(numbers.scale.device)
        now = numbers.scale, numbers.tracker
        if self._spare is None or [t.device for t in self._spare] != [t.device for t in now]:
            self._spare = numbers.scale.clone(), numbers.tracker.clone()
        self._start = Start(numbers)
        identity = (*numbers.settings.values(), *map(id, now), *map(id, self._spare))
        if identity not in self._known:
            if len(self._known) > 1:
                self._known.clear()
            self._known[identity] = now, self._spare, numbers.update_to(*self._spare)
        return self._known[identity][2]

    def stepped(self, reports: _C.StepReports | None) -> None:
        """The step with the update was queued; reports: where its device reports the decision."""
        self._is_ahead = self._start is not None
        self._reports = reports

    def take(self, *, alone: bool) -> Pair | None:
        """The numbers computed ahead if they are valid. alone: one optimizer made the iteration."""
        is_ahead, self._is_ahead = self._is_ahead, False
        numbers, start = self._numbers(), self._start
        if self._in_graph or not alone or not is_ahead or not (start and start.still(numbers)):
            return None
        taken, self._spare = self._spare, (numbers.scale, numbers.tracker)
        return taken

    def in_place(self, found_inf: Tensor, max_abs: Tensor | None) -> None:
        """Updates the numbers in place; one-element tensors on the scale's device."""
        numbers = self._numbers()
        scale, policy = numbers.scale, numbers.policy
        self.forget()
        if policy is not None and policy.needs_max_abs and max_abs is None:
            policy.update(found_inf)  # raises unless there was an overflow
            scale.copy_(policy.scale_tensor)
            return
        self._make_reports(scale.device)
        largest = None if max_abs is None else max_abs.double()
        update = numbers.update_to(scale, numbers.tracker)
        _C.update_scale_(update, found_inf.double(), largest, self._own)
        self._reports = self._own

    def warn_of_skips(self, seen: list[Optimizer | None], found_inf: Tensor) -> None:
        """Warns where updates in place skip again and again; amp_mp's optimizers do it alone.

        seen: the optimizers of the iteration that are not amp_mp's, and perhaps others. On CUDA it
        does not wait, and what has been reported counts.
        """
        others = [o for o in seen if o is not None and not getattr(o, "amp_scaling", False)]
        if not others or is_capturing(found_inf.device):
            return
        if self._own is None:
            self._watch.count(bool(found_inf > 0))
        elif found := self._own.newest(wait=False):
            self._watch.steps, self._watch.in_a_row = found.number, found.skipped_in_a_row
        groups = [o.param_groups for o in others]
        scale = self._numbers().scale
        self._watch.warn_of_skips("GradScaler", lambda: describe_nonfinite(groups, float(scale)))

    def _make_reports(self, device: torch.device) -> None:
        """Allocates what `in_place` reports to, before a CUDA graph is captured."""
        if device.type == "cuda" and (self._own is None or self._own.device != device):
            self._own = _C.StepReports(device)

    def reported(self) -> float | None:
        """The scale, if a report tells it; waits for the newest report that was queued."""
        if self._reports is None or self._is_ahead:
            return None
        report = self._reports.newest(wait=True)
        return report.next_scale or None if report else None
