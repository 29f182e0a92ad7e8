"""Where a GradScaler's scale and its other numbers are written after an iteration."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.optim.step.capture import is_capturing
from amp_mp.scaling.observe import SkipWarning, describe_nonfinite
from amp_mp.scaling.policies import ScalePolicy


class ScaleState(NamedTuple):
    """A scaler's numbers: torch's two tensors, torch's settings by name, and a policy or None."""

    scale: Tensor
    growth_tracker: Tensor
    settings: dict[str, Any]
    policy: ScalePolicy | None

    def tensors(self) -> list[Tensor]:
        """The tensors that an update writes."""
        own = [self.scale, self.growth_tracker]
        return own if self.policy is None else [*own, self.policy.state_tensor]

    def update_to(self, to: list[Tensor]) -> _C.ScaleUpdate:
        """The native update from these tensors to others like them, or to themselves."""
        if self.policy is not None:
            state = self.policy.state_tensor
            return _C.ScaleUpdate(policy=state, policy_out=to[2], scale_out=to[0])
        old: dict[str, Any] = {"scale": self.scale, "tracker": self.growth_tracker}
        return _C.ScaleUpdate(**old, scale_out=to[0], tracker_out=to[1], **self.settings)


Key = tuple[float, ...]


class ScaleUpdates:
    """Updates a GradScaler's numbers once per iteration; `state` gives them as they are now.

    The step of one optimizer computes, in the same launch, what the numbers will be if no other
    optimizer takes part in the iteration; `update` then only exchanges the tensors, which costs no
    kernel. The scale must not change before `update`: a GAN scales its second loss after the first
    optimizer has stepped. Otherwise `update` writes the numbers in place; and so it does for ever
    once a CUDA graph has been captured that reads the scale, since its replays read one address.
    """

    def __init__(self, state: Callable[[], ScaleState]) -> None:
        self._state = state
        self._spare: list[Tensor] = []
        # Native updates of the last two iterations, with their tensors: as long as these are
        # referenced, no other tensor gets the same id.
        self._known: dict[Key, tuple[list[Tensor], _C.ScaleUpdate]] = {}
        self._asked: Key | None = None  # what the update handed to a step starts from
        self._ahead: Key | None = None  # what the numbers in `_spare` were computed from
        self._stepped: _C.StepReports | None = None  # of the optimizer that made them
        self._reports: _C.StepReports | None = None  # where the last update was reported
        self._own: _C.StepReports | None = None
        self._in_graph = False  # whether a CUDA graph reads the scale
        self._counted = 0, 0  # on a CPU: updates in place, and overflows in a row
        self._skip_warning = SkipWarning()

    def forget(self) -> None:
        """Drops numbers computed ahead: the scale was set by hand, or the step did not run."""
        self._asked = self._ahead = self._reports = None

    def is_read(self, device: torch.device) -> None:
        """Call it wherever the scale on this device is read: remembers captures.

        Compiled code counts as one, because it may be captured later without asking again.
        """
        if device.type == "cuda" and (torch.compiler.is_dynamo_compiling() or is_capturing(device)):
            self._in_graph = True

    def _key(self, state: ScaleState) -> Key:
        """Stays equal until something else writes what the next numbers depend on."""
        versions = [n for t in state.tensors() for n in (id(t), t._version)]
        return (*state.settings.values(), *versions)

    def for_step(self) -> _C.ScaleUpdate | None:
        """The update that the step of an iteration's only optimizer computes; None: none does."""
        state = self._state()
        device = state.scale.device
        self._asked = self._ahead = None
        if self._in_graph:
            return None
        self._make_reports(device)
        if state.policy is not None:
            state.policy.to(device)
        now = state.tensors()
        if [t.device for t in self._spare] != [t.device for t in now]:
            self._spare = [t.clone() for t in now]
        self._asked = self._key(state)
        identity = (*state.settings.values(), *map(id, now), *map(id, self._spare))
        if identity not in self._known:
            if len(self._known) > 1:
                self._known.clear()
            self._known[identity] = [*now, *self._spare], state.update_to(self._spare)
        return self._known[identity][1]

    def stepped(self, reports: _C.StepReports | None) -> None:
        """The step with the update was queued; reports: where its device reports the decision."""
        self._ahead, self._stepped = self._asked, reports

    def take(self, *, alone: bool) -> list[Tensor] | None:
        """The numbers computed ahead if they are valid. alone: one optimizer made the iteration."""
        ahead, self._ahead = self._ahead, None
        state = self._state()
        if self._in_graph or not alone or ahead is None or ahead != self._key(state):
            return None
        taken, self._spare = self._spare, state.tensors()
        if state.policy is not None:  # torch's tracker stays where it is
            state.policy.state_tensor = taken[2]
            self._spare[1], taken[1] = taken[1], self._spare[1]
        self._reports = self._stepped
        return taken[:2]

    def in_place(self, found_inf: Tensor, max_abs: Tensor | None) -> None:
        """Updates the numbers in place; one-element tensors on the scale's device."""
        state = self._state()
        scale, policy = state.scale, state.policy
        self.forget()
        if policy is not None:
            policy.to(scale.device)
            if policy.needs_max_abs and max_abs is None:
                policy.update(found_inf)  # raises unless there was an overflow
                scale.copy_(policy.scale_tensor)
                return
        self._make_reports(scale.device)
        largest = None if max_abs is None else max_abs.double()
        update = state.update_to(state.tensors())
        _C.update_scale_(update, found_inf.double(), largest, self._own)
        self._reports = self._own

    def warn_of_skips(self, states: list[dict[str, Any]], found_inf: Tensor) -> None:
        """Warns where iterations are skipped again and again; amp_mp's optimizers do it alone.

        Call it after each update in place, with the optimizers' states. On CUDA it does not wait,
        and what has been reported counts.
        """
        seen = [state["optimizer"]() for state in states if "optimizer" in state]
        others = [o for o in seen if o is not None and not getattr(o, "amp_scaling", False)]
        if not others or is_capturing(found_inf.device):
            return
        if self._own is not None:
            found = self._own.newest(wait=False)
            step, in_a_row = (found[0], found[7]) if found is not None else (0, 0)
        else:
            step, in_a_row = self._counted
            step, in_a_row = step + 1, in_a_row + 1 if bool(found_inf > 0) else 0
            self._counted = step, in_a_row
        describe = partial(describe_nonfinite, [o.param_groups for o in others], 1.0)
        self._skip_warning.count("GradScaler", step, in_a_row, describe)

    def _make_reports(self, device: torch.device) -> None:
        """Allocates what `in_place` reports to, before a CUDA graph is captured."""
        if device.type == "cuda" and (self._own is None or self._own.device != device):
            self._own = _C.StepReports(device)

    def reported(self) -> float | None:
        """The scale, if a report tells it; waits for the newest report that was queued."""
        if self._reports is None or self._ahead is not None:
            return None
        report = self._reports.newest(wait=True)
        return report[6] if report and report[6] != 0 else None
