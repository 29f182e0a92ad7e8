"""The masters of an FP16_Optimizer around one of amp_mp's optimizers, which keeps its own."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.apex.gradients import clip_gradients
from amp_mp.apex.masters import Masters
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.optim.base import FusedOptimizer, stepper_of
from amp_mp.optim.state.masters import master_of, set_master
from amp_mp.optim.step.handed import Handed
from amp_mp.sharding.gradients import overflow_in


class FusedMasters(Masters):
    """The masters in a fused optimizer's state; the model's gradients are scaled until the step."""

    _optimizer: FusedOptimizer

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._scale = 1.0  # that the gradients carry
        self._max_norm: float | None = None  # to which the next step clips
        self._measured: _C.Measured | None = None  # statistics of the gradients as they are now
        super().__init__(optimizer)

    def refresh(self) -> None:
        """Makes the whole state of every trainable parameter; TypeError as in Masters."""
        self.refuse_dtypes()
        own, rules = self._optimizer, stepper_of(self._optimizer).group_rules()
        _C.init_states(rules, own.param_groups, own.state)

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The model's low-precision parameters, also those without masters (master="none")."""
        groups = self.groups()
        return [[p for p in g if p.requires_grad and p.dtype in LOW_PRECISION] for g in groups]

    def grouped_pairs(self) -> list[list[tuple[Tensor, Tensor]]]:
        """As in Masters, but the masters are copies, to be read only."""
        state = self._optimizer.state
        groups = [[(p, master_of(p, state[p])) for p in params] for params in self.fp16_groups]
        return [[(p, m) for p, m in pairs if m is not None] for pairs in groups]

    def scaled_params(self) -> list[Tensor]:
        """As in Masters; the step unscales float32 gradients as well."""
        return [param for param in self.params() if param.requires_grad]

    @contextmanager
    def backward(self, scale: float, collects: bool) -> Iterator[None]:
        """A block that does nothing: the gradients stay where they are."""
        yield

    def collect(self, scale: float, checks: bool) -> tuple[bool, float]:
        """Reads the gradients once if they are to be checked; copies nothing."""
        self._max_norm, self._scale, self._measured = None, scale, None
        if not checks:
            return False, 0.0
        self._measured = stepper_of(self._optimizer).measure()
        return overflow_in(self._measured.totals(), scale)

    def clip(self, max_norm: float, norm_type: float) -> float:
        """Leaves clipping by the 2-norm to the next step; clips by other norms at once."""
        if norm_type != 2:
            groups = self._optimizer.process_groups
            norm = clip_gradients(self.params(), max_norm * self._scale, norm_type, groups)
            if self._measured is not None:
                self._measured = stepper_of(self._optimizer).measure()  # the gradients have changed
            return norm / self._scale
        self._max_norm = max_norm if self._max_norm is None else min(max_norm, self._max_norm)
        if self._measured is None:
            self._measured = stepper_of(self._optimizer).measure()
        squares = sum(float(total[0]) for total in self._measured.totals().values())
        return math.sqrt(squares) / self._scale

    def gradients(self) -> list[list[Tensor | None]]:
        """The true gradients in float32, computed for this call."""
        groups, scale = super().gradients(), self._scale
        return [[None if g is None else g.float() / scale for g in group] for group in groups]

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """The optimizer's step, which unscales and clips; with a closure, after it has run."""

        def evaluate() -> Any:
            assert closure is not None
            loss = closure()
            stepper_of(self._optimizer).handed = self._handed()  # known only now, inside the step
            return loss

        step_with = stepper_of(self._optimizer).step_with
        try:
            return step_with(self._handed()) if closure is None else step_with(Handed(), evaluate)
        finally:
            self._max_norm, self._measured = None, None

    def _handed(self) -> Handed:
        return Handed(self._scale, measured=self._measured, max_norm=self._max_norm)

    def to_model(self) -> None:
        """Does nothing: the step has written the parameters."""

    def snapshot(self, optimizer: dict[str, Any]) -> list[list[Tensor]]:
        """The masters in the optimizer's snapshot, so that a file has each of them once."""
        found = []
        for saved, params in zip(optimizer["param_groups"], self.groups(), strict=True):
            states = [optimizer["state"].get(index, {}) for index in saved["params"]]
            live = self._optimizer.state  # the snapshot shows remainders as bfloat16 bits
            masters = [
                state["master"] if "master" in state else master_of(p, live.get(p, {}))
                for p, state in zip(params, states, strict=True)
                if p.dtype in LOW_PRECISION
            ]
            found.append([m for m in masters if m is not None])
        return found

    @torch.no_grad()
    def load(self, saved: list[list[Tensor]]) -> None:
        """As in Masters; writes the parameters too, which become the rounded masters."""
        self.refresh()  # the snapshot may come from an optimizer that keeps no masters of its own
        groups = zip(self._optimizer.param_groups, self.grouped_pairs(), saved, strict=True)
        for group, pairs, values in groups:
            for (param, master), value in zip(pairs, values, strict=True):
                master.copy_(value)
                set_master(group["master"], param, self._optimizer.state[param], master)
