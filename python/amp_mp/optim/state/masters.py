"""Blocks that edit float32 masters, and parameters that hold averages meanwhile."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

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


def replaced(nest: Any, replace: Callable[[Any, str], Any], name: str = "params") -> Any:
    """A nest of lists, tuples, dicts and other iterables, with what takes each leaf's place.

    Only lists, tuples and dicts stay what they are. name: the nest's; a leaf's is
    "params[0]['weight']".
    """
    is_leaf = isinstance(nest, Tensor | str)
    if not is_leaf and hasattr(nest, "items"):
        return {key: replaced(x, replace, f"{name}[{key!r}]") for key, x in nest.items()}
    if is_leaf or not isinstance(nest, Iterable):
        return replace(nest, name)
    found = [replaced(x, replace, f"{name}[{i}]") for i, x in enumerate(nest)]
    return tuple(found) if isinstance(nest, tuple) else found


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
        if params is None:
            params = [param for group in groups for param in _C.params_of(group)]
        own: list[tuple[str, Any]] = []  # with names for messages

        def collect(leaf: Any, name: str) -> Any:
            own.append((name, leaf))
            return leaf

        nest = replaced(params, collect)
        block = _C.EditedMasters(rules, groups, state, own, self.open)
        refuse_swapped((leaf for _, leaf in own), "masters()")
        found = iter(block.masters)
        masters = replaced(nest, lambda leaf, name: next(found))
        try:
            try:
                self.open.append(block)
                with torch.no_grad():
                    yield masters
            finally:
                self.open[:] = [each for each in self.open if each is not block]
        finally:  # where an interrupt came before the line above
            self.open[:] = [each for each in self.open if each is not block]
        now: list[Any] = []
        replaced(masters, lambda leaf, name: now.append(leaf))
        if [*map(id, now)] != [*map(id, block.masters)]:
            raise RuntimeError(
                "a master was exchanged for another object inside of a block of masters(); write "
                "it in place, as in master.copy_(...); nothing was stored"
            )
        block.store()
