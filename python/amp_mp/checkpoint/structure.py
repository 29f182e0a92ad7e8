"""Containers, as they were saved: keys that are no strings, empty dicts, Counters.

torch.distributed.checkpoint makes every key a string and leaves out empty dicts. A MultiStepLR,
whose milestones are a Counter of integers, would never reach one after loading. So `save` adds one
entry, which holds the containers, with keys of the checkpoint in place of what is in them.
"""

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

from amp_mp.checkpoint.contents import STRUCTURE, Contents


def with_structure(state: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """A state to save, and with it the containers of `kept`, some of its values by name."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    flat, _ = flatten_state_dict(kept)
    named = {name: _names(value, name, set(flat)) for name, value in kept.items()}
    return {**state, STRUCTURE: (named,)}  # a tuple is stored as one value


def _names(value: Any, key: str, leaves: set[str]) -> Any:
    if key in leaves:
        return key
    changes = isinstance(value, MutableMapping | list)
    made: Any = copy.copy(value) if changes else dict(value)
    for each in value if isinstance(value, Mapping) else range(len(value)):
        made[each] = _names(value[each], f"{key}.{each}", leaves)
    return made


def rebuilt(contents: Contents, values: dict[str, Any]) -> dict[str, Any]:
    """What was saved beside the model and the optimizer. values: what was read, by key."""
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

    if STRUCTURE not in values:  # written by torch
        return unflatten_state_dict(values, {key: contents.paths[key] for key in values})
    (named,) = values[STRUCTURE]
    return {name: _values(value, values) for name, value in named.items()}


def _values(named: Any, values: dict[str, Any]) -> Any:
    if isinstance(named, str):
        return values[named]
    for each in named if isinstance(named, Mapping) else range(len(named)):
        named[each] = _values(named[each], values)
    return named
