"""Blocks that edit float32 masters, and parameters that hold averages meanwhile."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from amp_mp import _C
from amp_mp.optim.rule import Rule

swapped: set[int] = set()  # ids of the parameters that hold averages now


def refuse_swapped(tensors: Iterable[Any], what: str) -> None:
    """Raises RuntimeError inside of `AveragedModel.swap` for one of the tensors."""
    if swapped and not swapped.isdisjoint(map(id, tensors)):
        raise RuntimeError(
            f"{what} inside of AveragedModel.swap(), where the model's weights are averages; do it "
            "after the block"
        )


class MasterBlocks:
    """The blocks of an optimizer's `masters` that have not ended."""

    def __init__(self) -> None:
        self.open: list[_C.EditedMasters] = []

    def refuse(self, what: str) -> None:
        """Raises RuntimeError inside of a block."""
        if self.open:
            raise RuntimeError(
                f"{what} inside of a block of masters(), whose end would overwrite the result; do "
                "it after the block"
            )

    @contextmanager
    def edit(self, params: Any, rules: list[Rule], groups: list[Any], state: Any) -> Iterator[Any]:
        """See FusedOptimizer.masters; rules: of each group. state: the optimizer's."""
        block = _C.EditedMasters(rules, groups, state, params, self.open)
        refuse_swapped(block.params, "masters()")
        try:
            try:
                self.open.append(block)
                with torch.no_grad():
                    yield block.masters
            finally:
                self.open[:] = [each for each in self.open if each is not block]
        finally:  # where an interrupt came before the line above
            self.open[:] = [each for each in self.open if each is not block]
        block.store()
