"""Tensors inside containers: a function applied to each of them, and a list of them."""

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from amp_mp.torch_private import tree_flatten, tree_unflatten


def map_tensors(function: Callable[[Tensor], Tensor], value: Any, results: bool = False) -> Any:
    """A value with the function applied to its tensors; the value itself if that changes none.

    Looks into tuples, lists, dicts and packed sequences. results: also into dataclasses and what
    torch's pytrees know (outputs of transformers and diffusers). Among a module's arguments such
    objects stay: a cache that it writes to must not be a copy.
    """
    if isinstance(value, Tensor):
        return function(value)
    leaves, spec = tree_flatten(value, is_leaf=None if results else _is_object)
    mapped = [_map_leaf(function, leaf, results) for leaf in leaves]
    same = all(new is old for new, old in zip(mapped, leaves, strict=True))
    return value if same else tree_unflatten(mapped, spec)


def _is_object(value: Any) -> bool:
    return not isinstance(value, tuple) and type(value) not in (list, dict, OrderedDict)


def _map_leaf(function: Callable[[Tensor], Tensor], leaf: Any, results: bool) -> Any:
    if isinstance(leaf, Tensor):
        return function(leaf)
    if isinstance(leaf, nn.utils.rnn.PackedSequence):
        data = function(leaf.data)
        return leaf if data is leaf.data else leaf._replace(data=data)
    if not results or not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    old = {field.name: getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)}
    new = {name: map_tensors(function, value, results) for name, value in old.items()}
    if all(new[name] is value for name, value in old.items()):
        return leaf
    result = copy.copy(leaf)
    for name, value in new.items():
        object.__setattr__(result, name, value)
    return result


def tensors_in(*values: Any, results: bool = False) -> list[Tensor]:
    """The tensors that map_tensors finds in these values, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    for value in values:
        map_tensors(note, value, results)
    return found
