"""The pairs of low-precision parameters and float32 masters in a wrapped optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from amp_mp.master.gradients import copy_all_
from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.originals import LOW_PRECISION, take_original
from amp_mp.optim.state import master_of


class Masters:
    """Puts masters in the place of an optimizer's low-precision parameters, and knows both.

    The lists have one list a param_group, in order. Raises TypeError, before anything is changed,
    for a trainable parameter that is neither float16, bfloat16 nor float32.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """See the class."""
        self._optimizer = optimizer
        self._low: dict[Tensor, Tensor] = {}  # each master's parameter
        self.fp16_groups: list[list[Tensor]] = []  # the model's low-precision parameters
        self.fp32_from_fp16_groups: list[list[Tensor]] = []  # their masters
        self.fp32_from_fp32_groups: list[list[Tensor]] = []  # the model's float32 parameters
        self.refresh()

    def refresh(self) -> None:
        """Gives masters to what is trainable, in low precision and has none, and its state to them.

        At first that is everything; later what was frozen and is no more, or was added.
        """
        groups = [group["params"] for group in self._optimizer.param_groups]
        for index, params in enumerate(groups):
            check_dtypes(index, params)
        for params in groups:
            for i, param in enumerate(params):
                if param.requires_grad and param.dtype in LOW_PRECISION:
                    params[i] = self._adopt(param)
        self.fp32_from_fp16_groups = [[p for p in ps if p in self._low] for ps in groups]
        self.fp16_groups = [[self._low[m] for m in ms] for ms in self.fp32_from_fp16_groups]
        self.fp32_from_fp32_groups = [
            [p for p in ps if p.requires_grad and p not in self._low] for ps in groups
        ]

    def _adopt(self, param: Tensor) -> Tensor:
        state = self._optimizer.state.pop(param, None)
        fused = isinstance(self._optimizer, FusedOptimizer)
        own = master_of(param, state) if state and fused else None  # ours has one already
        master = nn.Parameter(take_original(param) if own is None else own)
        if state is not None:
            for name in ("master", "remainder"):
                state.pop(name, None)
            self._optimizer.state[master] = {k: _widen(v) for k, v in state.items()}
        self._low[master] = param
        return master

    def are_complete(self) -> bool:
        """Whether nothing in the groups waits for a master, or is new."""
        known = zip(
            self._optimizer.param_groups,
            self.fp32_from_fp16_groups,
            self.fp32_from_fp32_groups,
            strict=False,
        )
        return len(self.fp16_groups) == len(self._optimizer.param_groups) and all(
            sum(p.requires_grad for p in group["params"]) == len(masters) + len(whole)
            for group, masters, whole in known
        )

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Every low-precision parameter with its master."""
        groups = zip(self.fp16_groups, self.fp32_from_fp16_groups, strict=True)
        return [pair for low, masters in groups for pair in zip(low, masters, strict=True)]

    def whole(self) -> list[Tensor]:
        """Every float32 parameter."""
        return [param for group in self.fp32_from_fp32_groups for param in group]

    @torch.no_grad()
    def to_model(self) -> None:
        """Rounds the masters into the model's parameters; float16 saturates at +-65504."""
        pairs = self.pairs()
        copy_all_([low for low, _ in pairs], [master for _, master in pairs], saturate=True)

    def check(self, saved: list[list[Tensor]]) -> None:
        """Raises ValueError if a snapshot of the masters has other groups or shapes."""
        check_masters(saved, self.fp32_from_fp16_groups)

    @torch.no_grad()
    def load(self, saved: list[list[Tensor]]) -> None:
        """Copies a snapshot of the masters that has been checked."""
        for own, group in zip(self.fp32_from_fp16_groups, saved, strict=True):
            for master, value in zip(own, group, strict=True):
                master.copy_(value)


def check_masters(saved: list[list[Tensor]], masters: list[list[Tensor]]) -> None:
    """Raises ValueError if saved masters have other groups or shapes than those there are."""
    shapes = [[tuple(m.shape) for m in group] for group in saved]
    own = [[tuple(m.shape) for m in group] for group in masters]
    if shapes != own:
        raise ValueError(
            f"state_dict: fp32_from_fp16 has masters of shapes {shapes}, "
            f"this optimizer has {own}; nothing was loaded"
        )


def check_dtypes(index: int, params: list[Tensor]) -> None:
    """Raises TypeError for a trainable parameter of another dtype than there are masters for."""
    for position, param in enumerate(params):
        if param.requires_grad and param.dtype not in (*LOW_PRECISION, torch.float32):
            raise TypeError(
                f"parameter {position} of group {index} (shape {tuple(param.shape)}) has dtype "
                f"{param.dtype}; FP16_Optimizer takes float16, bfloat16 and float32"
            )


def _widen(value: Any) -> Any:
    """Optimizer state for a float32 master."""
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW_PRECISION else value


def snapshot(value: Any) -> Any:
    """A copy with every tensor in it cloned: lists, tuples and dicts are entered."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: snapshot(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(snapshot(v) for v in value)
    return value
