"""FP16_Optimizer around one of amp_mp's optimizers, which have masters of their own.

There is no second copy of anything: gradients stay in the model, scaled, and the optimizer's one
pass unscales, clips, updates and rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from amp_mp.master.fp16_optimizer import FP16_Optimizer
from amp_mp.master.masters import check_dtypes, check_masters
from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.originals import LOW_PRECISION
from amp_mp.optim.state import ensure_state, master_of, set_master


class OwnMasters:
    """The masters in a fused optimizer's state, with the interface of Masters."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        """Makes every state there will be; raises TypeError as Masters does."""
        self._optimizer = optimizer
        self.refresh()

    def refresh(self) -> None:
        """Gives masters to what has none."""
        for index, group in enumerate(self._optimizer.param_groups):
            check_dtypes(index, group["params"])
        ensure_state(self._optimizer)

    def are_complete(self) -> bool:
        """The optimizer looks after that at every step."""
        return True

    def _trainable(self, low: bool) -> list[list[Tensor]]:
        return [
            [p for p in g["params"] if p.requires_grad and (p.dtype in LOW_PRECISION) == low]
            for g in self._optimizer.param_groups
        ]

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The low-precision parameters, a list a group."""
        return self._trainable(low=True)

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """Their masters; none with master="none". Split ones are decoded: copies, for reading."""
        return [[m for _, m in self._decoded(params)] for params in self.fp16_groups]

    def _decoded(self, params: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        state = self._optimizer.state
        pairs = [(p, master_of(p, state[p])) for p in params]
        return [(p, master) for p, master in pairs if master is not None]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The float32 parameters, their own masters."""
        return self._trainable(low=False)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Every low-precision parameter with its master."""
        return self._decoded([p for params in self.fp16_groups for p in params])

    def whole(self) -> list[Tensor]:
        """Every float32 parameter."""
        return [param for params in self.fp32_from_fp32_groups for param in params]

    def to_model(self) -> None:
        """The optimizer has written the parameters with the masters."""

    def check(self, saved: list[list[Tensor]]) -> None:
        """Raises ValueError if a snapshot of the masters has other groups or shapes."""
        check_masters(saved, self.fp32_from_fp16_groups)

    @torch.no_grad()
    def load(self, saved: list[list[Tensor]]) -> None:
        """Copies a snapshot of the masters that has been checked."""
        self.refresh()  # another FP16_Optimizer's snapshot has them nowhere else
        groups = zip(self._optimizer.param_groups, self.fp16_groups, saved, strict=True)
        for own, params, values in groups:
            for (param, _), value in zip(self._decoded(params), values, strict=True):
                master = torch.empty_like(param, dtype=torch.float32).copy_(value)
                set_master(own["master"], param, self._optimizer.state[param], master)


class FoldedFP16Optimizer(FP16_Optimizer):
    """What FP16_Optimizer(...) makes of an amp_mp optimizer; use that name.

    Differences to see: param_groups keep the model's parameters, whose `.grad` carries the scale
    until the step; fp32_from_fp16_groups are the optimizer's own masters.
    """

    _masters: Any
    optimizer: Any  # a FusedOptimizer
    _scale = 1.0  # that the gradients carry
    _clip: float | None = None  # for the next step
    _totals: tuple[Tensor, ...] = ()  # what the last read of the gradients found, if there was one

    def _make_masters(self, optimizer: Any) -> Any:
        return OwnMasters(optimizer)

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """loss.backward() on the scaled loss.

        Args:
            loss: a tensor of one element; multiplied in float32.
            update_master_grads: False to check the gradients only when update_master_grads() is
                called, after several losses.
            retain_graph: as in Tensor.backward.
        """
        torch.autograd.backward(loss.float() * self.loss_scale, retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Reads the gradients once where they are to be checked; copies nothing."""
        self._clip, self._scale, self._totals = None, self.loss_scale, tuple[Tensor, ...]()
        if self._checks:
            self._measure()
            self.overflow = any(bool(total[2] > 0) for total in self._totals)
            largest = max((float(total[1]) for total in self._totals), default=0.0)
            self._max_abs = largest / self._scale

    def _measure(self) -> None:
        """Reads the gradients, for whoever asks before the step and for the step itself."""
        self._totals = tuple(self.optimizer.measure_gradients().values())

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> float:
        """The next step clips by the gradients' global norm; returns the norm, -1 on overflow.

        As torch.nn.utils.clip_grad_norm_; call it between backward and step. Other norms than the
        2-norm are clipped at once, in the gradients.
        """
        if self.overflow:
            return -1.0
        if norm_type != 2:
            params = [p for group in self.param_groups for p in group["params"]]
            limit = max_norm * self._scale
            norm = float(nn.utils.clip_grad_norm_(params, limit, norm_type))
            if self._totals:
                self._measure()  # they have changed
            return norm / self._scale
        self._clip = max_norm if self._clip is None else min(max_norm, self._clip)
        if not self._totals:
            self._measure()
        return math.sqrt(sum(float(total[0]) for total in self._totals)) / self._scale

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """The true gradients in float32, made for the occasion; on overflow None and a warning."""
        if self.overflow:
            return super().inspect_master_grad_data()
        return [
            [None if p.grad is None else p.grad.detach().float() / self._scale for p in g["params"]]
            for g in self.param_groups
        ]

    def _step_inner(self, closure: Callable[[], Any] | None) -> Any:
        optimizer = self.optimizer
        own_clip = optimizer.max_grad_norm
        try:
            if closure is None:
                self._hand_over()
            return optimizer.step(closure)
        finally:
            self._clip, self._totals = None, ()
            optimizer.max_grad_norm = own_clip
            for name in ("grad_scale", "found_inf"):
                vars(optimizer).pop(name, None)

    def _hand_over(self) -> None:
        """Tells the optimizer what the gradients carry; with a closure, once it has run."""
        self.optimizer.grad_scale = self._scale
        if self._totals:  # so that the step does not read the gradients again
            self.optimizer.found_inf = 0.0
        if self._clip is not None:
            self.optimizer.max_grad_norm = self._clip

    def _snapshot_masters(self, optimizer: dict[str, Any]) -> list[list[Tensor]]:
        """Those in the optimizer's snapshot: a file has them once."""
        found = []
        for group, own in zip(optimizer["param_groups"], self.param_groups, strict=True):
            rows = zip(group["params"], own["params"], strict=True)
            low = [(p, optimizer["state"].get(i, {})) for i, p in rows if p.dtype in LOW_PRECISION]
            masters = [master_of(p, state) for p, state in low]
            found.append([m for m in masters if m is not None])
        return found
