"""Where a GradScaler's numbers go after an iteration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.optim.capture import is_capturing

if TYPE_CHECKING:
    from amp_mp.scaling.grad_scaler import GradScaler


class NextScale:
    """Moves a GradScaler's scale on.

    The step of one optimizer works out, in passing, what the numbers will be if no other optimizer
    takes part in the iteration; `update` then only puts them in the place of the old ones, which
    costs no kernel. The scale must not move before `update`: a GAN's second loss is scaled after
    its first optimizer has stepped. Otherwise, and while a CUDA graph is captured, whose replays
    read one address, `update` moves the numbers where they are.
    """

    def __init__(self, scaler: GradScaler) -> None:
        """Of that scaler."""
        self._scaler = scaler
        self._spare: list[Tensor] = []
        self._asked: tuple[Any, ...] | None = None  # what the step under way makes numbers from
        self._ahead: tuple[Any, ...] | None = None  # what those in `_spare` were made from
        self._stepped: _C.Reports | None = None  # those of the optimizer that makes them
        self._reports: _C.Reports | None = None  # who has told of the last move
        self._own: _C.Reports | None = None

    def forget(self) -> None:
        """The numbers have been set by hand, or nothing has come of a step."""
        self._asked = self._ahead = self._reports = None

    def _numbers(self) -> list[Tensor]:
        """The scale, torch's growth tracker and the policy's state, if there is one."""
        scaler = self._scaler
        assert scaler._scale is not None
        assert scaler._growth_tracker is not None
        numbers = [scaler._scale, scaler._growth_tracker]
        return numbers if scaler._policy is None else [*numbers, scaler._policy._state]

    def _move(self, now: list[Tensor], to: list[Tensor]) -> _C.ScaleMove:
        if len(now) == 3:
            return _C.ScaleMove(policy=now[2], policy_out=to[2], scale_out=to[0])
        return _C.ScaleMove(
            scale=now[0],
            scale_out=to[0],
            tracker=now[1],
            tracker_out=to[1],
            growth_factor=self._scaler._growth_factor,
            backoff_factor=self._scaler._backoff_factor,
            growth_interval=self._scaler._growth_interval,
        )

    def _source(self) -> tuple[Any, ...]:
        """Equal as long as nobody has touched what the next numbers depend on."""
        scaler, now = self._scaler, self._numbers()
        factors = scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval
        return *factors, *((id(t), t._version) for t in now)

    def after(self, devices: list[torch.device]) -> _C.ScaleMove | None:
        """For a step on the devices: where to put the next numbers; None to leave it to update."""
        scaler = self._scaler
        self._asked = self._ahead = None
        if scaler._scale is None or devices != [scaler._scale.device]:
            return None
        (device,) = devices
        if is_capturing(device):
            return None
        self._hear(device)
        if scaler._policy is not None:
            scaler._policy.to(device)
        now = self._numbers()
        if [t.device for t in self._spare] != [t.device for t in now]:
            self._spare = [t.clone() for t in now]
        self._asked = self._source()
        return self._move(now, self._spare)

    def _hear(self, device: torch.device) -> None:
        """Gets ready for what `move` has to tell, before a graph is captured."""
        if device.type == "cuda" and (self._own is None or self._own.device != device):
            self._own = _C.Reports(device)

    def stepped(self, reports: _C.Reports | None) -> None:
        """That step has been queued; reports: who hears of it."""
        self._ahead, self._stepped = self._asked, reports

    def take(self, *, alone: bool) -> bool:
        """Puts the next numbers in place, where they hold; alone: one optimizer took part."""
        ahead, self._ahead = self._ahead, None
        if not alone or ahead is None or ahead != self._source():
            return False
        scaler, now = self._scaler, self._numbers()
        scaler._scale = self._spare[0]
        if scaler._policy is None:
            scaler._growth_tracker = self._spare[1]
        else:  # which leaves torch's tracker alone
            scaler._policy._state = self._spare[2]
            now[1] = self._spare[1]
        self._spare = now
        self._reports = self._stepped
        return True

    def move(self, found_inf: Tensor, max_abs: Tensor | None) -> None:
        """Moves the numbers where they are; one-element tensors on the scale's device."""
        scaler = self._scaler
        scale, policy = self._numbers()[0], scaler._policy
        self.forget()
        if policy is not None:
            policy.to(scale.device)
            if policy.needs_max_abs and max_abs is None:
                policy.update(found_inf)  # says what is missing, unless there was an overflow
                scale.copy_(policy.scale_tensor)
                return
        self._hear(scale.device)
        now = self._numbers()
        largest = None if max_abs is None else max_abs.double()
        _C.move_scale_(self._move(now, now), found_inf.double(), largest, self._own)
        self._reports = self._own

    def reported(self) -> float | None:
        """The scale, if a report tells it; waits for the last one that is on its way."""
        if self._reports is None or self._ahead is not None:
            return None
        report = self._reports.newest(wait=True)
        if report is None or report[-1] == 0:
            return None
        return float(report[-1])
