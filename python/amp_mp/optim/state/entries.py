"""The entries of a parameter's state: which one holds a state, in which format, and in files."""

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_mp.optim.state.formats import (
    CODES,
    DTYPES,
    MASTER_ENTRIES,
    REST_FORMATS,
    entry_name,
    is_grouped,
    rest_dtype,
    rest_name,
    scale_name,
    scale_shape,
    short_name,
)
from amp_mp.optim.state.old_codes import OLD_FORMATS
from amp_mp.sharding.shards import is_dtensor, like, local_of

# Files of before codes had names of their own: remainders of both formats under one name, codes
# under the state's name, which had the meaning of that time.
OLD_REMAINDERS = {"remainder": torch.bfloat16, "remainder_float16": torch.float16}
OLD_MEANINGS = {new: old for old, new in OLD_FORMATS.items()}


class Held(NamedTuple):
    """A state as a parameter's state holds it.

    format: of its entry's name; under the state's own name the dtype's name, which is no format
    where the tensor is none that the optimizers make.
    """

    entry: str
    format: str
    data: Tensor
    scale: Tensor | None


def entries_of(name: str) -> tuple[str, ...]:
    """All entries that may hold a state's data, by the state's name; one of them does."""
    return (name, *(entry_name(name, format) for format in CODES.values()))


def scales_of(name: str) -> tuple[str, ...]:
    """All entries that may hold a state's scales."""
    return tuple(scale_name(entry_name(name, f)) for f in CODES.values() if is_grouped(f))


def is_held(state: Mapping[str, Any], name: str) -> bool:
    """Whether a parameter's state holds the state of a name."""
    return any(state.get(entry) is not None for entry in entries_of(name))


def held_twice(state: Mapping[str, Any], name: str) -> list[str]:
    """The entries that hold the state, where there is more than one; none otherwise."""
    found = [entry for entry in entries_of(name) if state.get(entry) is not None]
    return found if len(found) > 1 else []


def held(state: Mapping[str, Any], name: str) -> Held | None:
    """How a parameter's state holds the state of a name, or None where it does not."""
    for entry in entries_of(name):
        data = state.get(entry)
        if data is not None:
            coded = CODES.get(entry.removeprefix(name))
            format = short_name(data.dtype) if coded is None else coded
            return Held(entry, format, data, state.get(scale_name(entry)))
    return None


def held_here(state: Mapping[str, Any], name: str) -> Held | None:
    """As `held`, of DTensors the parts on this process as plain tensors."""
    found = held(state, name)
    if found is None:
        return None
    return found._replace(data=local_of(found.data), scale=local_of(found.scale))


def store(
    state: MutableMapping[str, Any],
    name: str,
    param: Tensor,
    format: str,
    data: Tensor,
    scale: Tensor | None,
) -> None:
    """Puts a state's tensors into a parameter's state, in place of those that held it before.

    data, scale: plain tensors; beside a DTensor they become DTensors placed as it is.
    """
    for entry in (*entries_of(name), *scales_of(name)):
        state.pop(entry, None)
    entry = entry_name(name, format)
    state[entry] = like(data, param)
    if scale is not None:
        state[scale_name(entry)] = like(scale, param, scale_shape(param))


def state_of(entry: str, names: Iterable[str]) -> str | None:
    """The name of the state whose data an entry holds, among `names`; None for another entry."""
    suffix = next((suffix for suffix in CODES if entry.endswith(suffix)), "")
    name = entry.removesuffix(suffix)
    return name if name in names else None


def renamed(state: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """A file's state of a parameter with the names of today, bits as integers.

    group: the file's param_group, which says what the codes under a plain name are.
    """
    found: dict[str, Any] = {}
    for entry, value in state.items():
        name, end = entry.removesuffix("_scale"), "_scale" if entry.endswith("_scale") else ""
        data, tag = state.get(name), str(group.get(name))
        if entry in OLD_REMAINDERS and isinstance(value, Tensor):
            entry = rest_name(REST_FORMATS[value.dtype], OLD_REMAINDERS[entry])
        elif isinstance(data, Tensor) and DTYPES.get(tag) == data.dtype:
            entry = entry_name(name, OLD_MEANINGS.get(tag, tag)) + end
        found[entry] = as_integers(value) if has_bits(entry) else value
    return found


def has_bits(entry: str) -> bool:
    """Whether an entry holds 16-bit integers, which state dicts show as bfloat16 of equal bits."""
    if entry in MASTER_ENTRIES:
        return entry != "master" and rest_dtype(entry) == torch.int16
    coded = next((CODES[suffix] for suffix in CODES if entry.endswith(suffix)), None)
    return coded is not None and DTYPES[coded] == torch.int16


def as_integers(value: Any) -> Any:
    """The 16-bit integers that bfloat16 numbers show, as a view; anything else itself."""
    return viewed(value, torch.bfloat16, torch.int16)


def with_bits(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state as state dicts show it: no 16-bit integers, which gloo and NCCL lack."""
    return {
        entry: viewed(value, torch.int16, torch.bfloat16) if has_bits(entry) else value
        for entry, value in state.items()
    }


def viewed(value: Any, present: torch.dtype, wanted: torch.dtype) -> Any:
    """A tensor of one dtype as a view of another of the same width; anything else itself."""
    if not isinstance(value, Tensor) or value.dtype != present:
        return value
    if is_dtensor(value):
        return like(local_of(value).view(wanted), value)
    return value.view(wanted)
