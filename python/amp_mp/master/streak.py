"""Overflows in a row: which no loss scale can cure, and whose gradients they are."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import Tensor
from torch.optim.optimizer import Optimizer

STUCK = 5  # overflows in a row at a scale that cannot fall
INCURABLE = 40  # overflows in a row at all: from 2^32 down to 1 there are 32 halvings


def names_of(optimizers: Iterable[Optimizer]) -> list[tuple[str, Tensor]]:
    """Every parameter with its name if the optimizer was given named ones, else its place."""
    found = []
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            given = group.get("param_names")
            for position, param in enumerate(group["params"]):
                place = f"parameter {position} of group {index}"
                found.append((given[position] if given else place, param))
    return found


class OverflowStreak:
    """Counts overflows in a row, and warns, once a streak, when no scale can end it."""

    def __init__(self) -> None:
        """No overflow yet."""
        self.steps = self.count = self.stuck = 0

    def observe(
        self, found_inf: bool, before: float, after: float, params: list[tuple[str, Tensor]]
    ) -> None:
        """After every step. before, after: the scale; params: by name, with their gradients."""
        self.steps += 1
        if not found_inf:
            self.count = self.stuck = 0
            return
        self.count += 1
        self.stuck = self.stuck + 1 if after >= before else 0
        if self.stuck != STUCK and self.count != INCURABLE:
            return
        from amp_mp.diagnose.overflow import diagnose_overflow  # it imports this package

        floor = ", which cannot fall further" if self.stuck else ""
        warnings.warn(
            f"amp_mp: gradients have been inf or NaN in each of the last {self.count} steps, since "
            f"step {self.steps - self.count + 1}, and the loss scale is {after:g}{floor}: no scale "
            "can cure that. The gradients concerned, of this step:\n"
            f"{diagnose_overflow(params, before)}",
            stacklevel=4,
        )
