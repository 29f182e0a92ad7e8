"""The same optimizer on a GPU and on the CPU, step for step. The CPU says what the bits are."""

from __future__ import annotations

from typing import Any

import torch
from helpers import raw_bytes
from torch import Tensor, nn
from watching import Seen, watching

import amp_mp as amp


class Side:
    """An optimizer with its parameters on one device."""

    def __init__(self, device: str, shapes: list[tuple[int, ...]], **arguments: Any) -> None:
        source = torch.Generator().manual_seed(3)
        self.device = device
        self.dtype = arguments.pop("dtype", torch.bfloat16)
        kind = arguments.pop("kind", amp.optim.AdamW)
        self.params = [self.new(torch.randn(s, generator=source)) for s in shapes]
        groups = arguments.pop("groups", 1)
        split = [{"params": self.params[g::groups]} for g in range(groups)]
        self.optimizer = kind(split, **arguments)

    def new(self, values: Tensor) -> nn.Parameter:
        return nn.Parameter(values.to(self.device, self.dtype))

    def state(self) -> Any:
        return raw_bytes([[p.detach() for p in self.params], self.optimizer.state_dict()["state"]])


class Twins:
    """The same optimizer on the device and on the CPU; both get the same gradients."""

    def __init__(self, shapes: list[tuple[int, ...]], **arguments: Any) -> None:
        given = {"lr": 1e-2, "memory": "exact", "seed": 5, **arguments}
        self.ours, self.theirs = (Side(d, shapes, **given) for d in ("cuda", "cpu"))
        self.sides = (self.ours, self.theirs)
        self.old: list[Tensor | None] = [None] * 500
        # States made on another stream, which must not be dropped before they have been copied.
        self.kept: list[Any] = []

    def fill(self, seed: int, in_place: bool = False, without: set[int] | None = None) -> None:
        """New gradients; `in_place` at the same addresses."""
        source = torch.Generator().manual_seed(100 + seed)
        for i, param in enumerate(self.theirs.params):
            values = torch.randn(param.shape, generator=source)
            for side in self.sides:
                own = side.params[i]
                if without and i in without:
                    own.grad = None
                elif in_place and own.grad is not None:
                    own.grad.copy_(values)
                else:
                    self.old[i % len(self.old)] = own.grad  # whose address nothing else gets
                    own.grad = values.to(side.device, side.dtype)

    def step(self) -> None:
        for side in self.sides:
            side.optimizer.step()

    def seen(self) -> Seen:
        with watching() as seen:
            self.ours.optimizer.step()
        self.theirs.optimizer.step()
        return seen

    def each_group(self, **numbers: Any) -> None:
        for side in self.sides:
            for group in side.optimizer.param_groups:
                group.update(numbers)

    def check(self, when: Any = None) -> None:
        assert self.ours.state() == self.theirs.state(), when


def shapes_of(count: int) -> list[tuple[int, ...]]:
    return [[(3, 32), (7,), (64,), (1,), (0,)][i % 5] for i in range(count)]
