"""Blocks that edit float32 masters."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.optim.rule import Rule
from amp_mp.torch_private import keystr, tree_flatten_with_path, tree_leaves, tree_unflatten


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


@contextmanager
def edit_masters(params: Any, rules: list[Rule], groups: list[Any], state: Any) -> Iterator[Any]:
    """See FusedOptimizer.masters; rules: one for each group. state: the optimizer's."""
    if params is None:
        params = [param for group in groups for param in _C.params_of(group)]
    paths, nest = tree_flatten_with_path(_listed(params))
    own = [(f"params{keystr(path)}", leaf) for path, leaf in paths]
    block = _C.EditBlock(rules, groups, state, own)
    masters = tree_unflatten(block.masters, nest)
    try:
        try:
            block.borrow()
            with torch.no_grad():
                yield masters
        finally:
            block.give_back()
    finally:  # where an interrupt came before the line above
        block.give_back()
    if [*map(id, tree_leaves(masters))] != [*map(id, block.masters)]:
        raise RuntimeError(
            "a master was exchanged for another object inside of a block of masters(); write "
            "it in place, as in master.copy_(...); nothing was stored"
        )
    block.store()
