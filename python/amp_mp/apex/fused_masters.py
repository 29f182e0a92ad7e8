"""FP16_Optimizer around one of amp_mp's optimizers, which keeps masters itself.

Nothing is copied: gradients stay in the model, scaled, and the optimizer's one pass unscales,
clips, updates and rounds.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from amp_mp.apex.masters import check_dtypes, check_masters
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.state.init import init_states
from amp_mp.optim.state.masters import master_of, set_master
from amp_mp.optim.step.handed import Handed, Measured
from amp_mp.scaling.observe import observe


class FusedMasters:
    """The masters in a fused optimizer's state (masters.py, Masters).

    The param_groups keep the model's parameters, whose `.grad` carries the scale until the step.
    """

    def __init__(self, optimizer: FusedOptimizer) -> None:
        """Makes the state of all trainable parameters; TypeError for a dtype without masters."""
        self._optimizer = optimizer
        self._scale = 1.0  # that the gradients carry
        self._clip: float | None = None  # the norm for the next step
        self._measured: Measured | None = None  # what the last read of the gradients found
        self.refresh()

    def refresh(self) -> None:
        """Gives a master to every trainable low-precision parameter that has none."""
        optimizer = self._optimizer
        for index, group in enumerate(optimizer.param_groups):
            check_dtypes(index, group["params"])
        init_states(optimizer.rule(), optimizer.param_groups, optimizer.state)

    def _trainable(self, low: bool) -> list[list[Tensor]]:
        return [
            [p for p in g["params"] if p.requires_grad and (p.dtype in LOW_PRECISION) == low]
            for g in self._optimizer.param_groups
        ]

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The model's low-precision parameters."""
        return self._trainable(low=True)

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """Their masters; empty with master="none". Split masters are decoded copies, to be read."""
        return [[m for _, m in self._decoded(params)] for params in self.fp16_groups]

    def _decoded(self, params: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        state = self._optimizer.state
        pairs = [(p, master_of(p, state[p])) for p in params]
        return [(p, master) for p, master in pairs if master is not None]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The model's float32 parameters, which need no masters."""
        return self._trainable(low=False)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Every low-precision parameter with its master."""
        return self._decoded([p for params in self.fp16_groups for p in params])

    def model_param(self, param: Tensor) -> Tensor:
        """The parameter itself."""
        return param

    # Gradients.

    def backward(self, scale: float, collects: bool) -> AbstractContextManager[None]:
        """Nothing to prepare."""
        return nullcontext()

    def collect(self, scale: float, checks: bool) -> tuple[bool, float]:
        """Reads the gradients once if they are to be checked; copies nothing."""
        self._clip, self._scale, self._measured = None, scale, None
        if not checks:
            return False, 0.0
        self._measured = self._optimizer.measure()
        return observe(self._measured.totals(), scale)

    def clip(self, max_norm: float, norm_type: float) -> float:
        """Has the next step clip by the gradients' 2-norm; other norms are clipped at once."""
        if norm_type != 2:
            params = [p for group in self._optimizer.param_groups for p in group["params"]]
            norm = float(nn.utils.clip_grad_norm_(params, max_norm * self._scale, norm_type))
            if self._measured is not None:
                self._measured = self._optimizer.measure()  # the gradients have changed
            return norm / self._scale
        self._clip = max_norm if self._clip is None else min(max_norm, self._clip)
        if self._measured is None:
            self._measured = self._optimizer.measure()
        squares = sum(float(total[0]) for total in self._measured.totals().values())
        return math.sqrt(squares) / self._scale

    def gradients(self) -> list[list[Tensor | None]]:
        """The true gradients in float32, computed for this call."""
        return [
            [None if p.grad is None else p.grad.detach().float() / self._scale for p in g["params"]]
            for g in self._optimizer.param_groups
        ]

    def drop_gradients(self) -> None:
        """Nothing to do: the next `collect` starts anew."""

    # Steps.

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """The optimizer's step, which unscales and clips; with a closure, after it has run."""
        try:
            if closure is None:
                return self._optimizer.step_with(self._handed())
            return self._optimizer.step_with(Handed(), closure)
        finally:
            self._clip, self._measured = None, None

    def closure_done(self) -> None:
        """Passes on what the closure's gradients carry, inside the step."""
        self._optimizer.handed = self._handed()

    def _handed(self) -> Handed:
        return Handed(self._scale, measured=self._measured, max_norm=self._clip)

    def to_model(self) -> None:
        """Nothing to do: the optimizer has written the parameters."""

    # Snapshots.

    def snapshot(self, optimizer: dict[str, Any]) -> list[list[Tensor]]:
        """The masters in the optimizer's snapshot, so that a file has each of them once."""
        found = []
        for group, own in zip(optimizer["param_groups"], self._optimizer.param_groups, strict=True):
            rows = zip(group["params"], own["params"], strict=True)
            low = [(p, optimizer["state"].get(i, {})) for i, p in rows if p.dtype in LOW_PRECISION]
            masters = [master_of(p, state) for p, state in low]
            found.append([m for m in masters if m is not None])
        return found

    def check(self, saved: list[list[Tensor]]) -> None:
        """Raises ValueError if a snapshot of the masters has other groups or shapes."""
        check_masters(saved, self.fp32_from_fp16_groups)

    @torch.no_grad()
    def load(self, saved: list[list[Tensor]]) -> None:
        """Copies a checked snapshot into the masters."""
        self.refresh()  # the snapshot may come from an optimizer that keeps no masters of its own
        groups = zip(self._optimizer.param_groups, self.fp16_groups, saved, strict=True)
        for own, params, values in groups:
            for (param, _), value in zip(self._decoded(params), values, strict=True):
                master = torch.empty_like(param, dtype=torch.float32).copy_(value)
                set_master(own["master"], param, self._optimizer.state[param], master)
