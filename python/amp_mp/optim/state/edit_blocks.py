"""Blocks that edit float32 masters, and parameters that hold averages meanwhile."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.optim.rule import Rule
from amp_mp.torch_private import keystr, tree_flatten_with_path, tree_leaves, tree_unflatten

swapped: set[int] = set()  # ids of the parameters that hold averages now


def refuse_swapped(tensors: Iterable[Any], what: str) -> None:
    """Raises RuntimeError if one of the tensors holds averages, inside of `AveragedModel.swap`."""
    if swapped and not swapped.isdisjoint(map(id, tensors)):
        raise RuntimeError(
            f"{what} inside of AveragedModel.swap(), where the model's weights are averages; do it "
            "after the block"
        )


def _listed(nest: Any) -> Any:
    """The nest with dicts for all mappings, and lists for other iterables except tuples."""
    if isinstance(nest, Tensor | str):
        return nest
    if hasattr(nest, "items"):
        return {key: _listed(each) for key, each in nest.items()}
    if not isinstance(nest, Iterable):
        return nest
    found = map(_listed, nest)
    return tuple(found) if isinstance(nest, tuple) else list(found)


class MasterBlocks:
    """The blocks of an optimizer's `masters` that have not ended."""

    def __init__(self) -> None:
        self.open: list[_C.EditBlock] = []

    def refuse(self, what: str) -> None:
        """Raises RuntimeError inside of a block."""
        if self.open:
            raise RuntimeError(
                f"{what} inside of a block of masters(), whose end would overwrite the result; do "
                "it after the block"
            )

    @contextmanager
    def edit(self, params: Any, rules: list[Rule], groups: list[Any], state: Any) -> Iterator[Any]:
        """See FusedOptimizer.masters; rules: one for each group. state: the optimizer's."""
        if params is None:
            params = [param for group in groups for param in _C.params_of(group)]
        paths, nest = tree_flatten_with_path(_listed(params))
        own = [(f"params{keystr(path)}", leaf) for path, leaf in paths]
        block = _C.EditBlock(rules, groups, state, own, self.open)
        refuse_swapped((leaf for _, leaf in own), "masters()")
        masters = tree_unflatten(block.masters, nest)
        try:
            try:
                self.open.append(block)
                with torch.no_grad():
                    yield masters
            finally:
                self.open[:] = [each for each in self.open if each is not block]
        finally:  # where an interrupt came before the line above
            self.open[:] = [each for each in self.open if each is not block]
        if [*map(id, tree_leaves(masters))] != [*map(id, block.masters)]:
            raise RuntimeError(
                "a master was exchanged for another object inside of a block of masters(); write "
                "it in place, as in master.copy_(...); nothing was stored"
            )
        block.store()
