"""What is in a checkpoint directory, from its metadata alone; and containers as they were saved.

torch.distributed.checkpoint makes every key a string and leaves out empty dicts. A MultiStepLR,
whose milestones are a Counter of integers, would never reach one after loading. So `save` adds one
entry, which holds the containers, with keys of the checkpoint in place of what is in them.
"""

import copy
import os
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Set
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amp_mp.checkpoint.places import LOCAL, PLACES, Home, tables
from amp_mp.checkpoint.processes import number_of_processes, run, this_rank
from amp_mp.sharding.shards import is_dtensor, like, local_of
from amp_mp.torch_private import flatten_state_dict, unflatten_state_dict

PREVIOUS = ".previous"  # what `save` adds to the name of the checkpoint that it is replacing
STRUCTURE = "amp_mp.structure"  # the key under which `save` keeps containers
GROUPS = "optimizer.param_groups"  # where `save` keeps the param_groups


class Contents:
    """The names of everything in a directory of torch.distributed.checkpoint.

    keys: all keys. tensors: torch's metadata of those that are tensors. parts: the names at the
    top. Of what differs between processes, what this rank had has the keys that it has elsewhere.
    stored: the file's own key for each.
    places: what differs between the processes that saved it, by key (places.py). elsewhere: the
    keys of that of which this rank had nothing.
    model, optimizer: what stands before the names of parameters and before "state.NAME.ENTRY" in
    the keys; None where there is no such part. In what `save` wrote they are "model." and
    "optimizer."; in other files, which may call the two parts anything, they are found by the
    parameters' names.
    states: the keys of each parameter's optimizer state, by the parameter's name and by entry.
    groups: the keys of the optimizer's param_groups, each with the group's number and the setting,
    this rank's first. In files of flattened state dicts there is a parameter's name in place of a
    number.
    others: the keys of what is neither the model's nor the optimizer's.
    paths: how each key was nested.
    """

    def __init__(self, path: str | PathLike[str], names: Iterable[str]) -> None:
        """names: the model's parameters have these.

        Raises FileNotFoundError where there is no complete checkpoint, ValueError where several
        parts of it have the model's parameters.
        """
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        metadata = _read(Path(path))
        entries = metadata.state_dict_metadata
        self.places: dict[str, list[Home | None]] = {}
        if PLACES in entries:
            self.places = _read_places(Path(path))
        self.stored = self._found(entries)
        self.keys = set(self.stored)
        self.tensors = {
            key: found
            for key, stored in self.stored.items()
            if isinstance(found := entries[stored], TensorStorageMetadata)
        }
        nested = metadata.planner_data or {}
        self.paths: dict[str, Any] = {key: (key,) for key in self.keys}
        for key, stored in self.stored.items():
            place = nested.get(stored, (stored,))
            self.paths[key] = place if key == stored else place[2:] or (key,)
        self.parts = {str(self.paths[key][0]) for key in self.keys - {STRUCTURE}}
        self.model: str | None = "model."
        self.optimizer: str | None = "optimizer."
        self.states: dict[str, dict[str, str]] = {}
        self.groups: dict[str, tuple[str, str]] = {}
        self.others: list[str] = []
        known = set(names)
        own = STRUCTURE in self.keys and ("model" in self.parts or bool(self.places))
        if not own:
            self._find_parts(known)
        self._sort({"model", "optimizer"} if own else self.parts)
        if own and self.keys.isdisjoint({f"model.{name}" for name in known}):
            self.model = None
        if own and (not self.groups or (self.states and known.isdisjoint(self.states))):
            self.optimizer = None

    def _found(self, entries: Iterable[str]) -> dict[str, str]:
        """The file's own keys, by those under which this process finds what they hold."""
        rank, world, found = this_rank(), number_of_processes(), {}
        fits = {key: own for key, own in self.places.items() if len(own) == world and own[rank]}
        self.elsewhere = self.places.keys() - fits.keys()
        for stored in entries:
            if not stored.startswith(f"{LOCAL}."):
                found[stored] = stored
                continue
            owner, _, key = stored.removeprefix(f"{LOCAL}.").partition(".")
            unit = key
            while unit and unit not in self.places:
                unit = unit.rpartition(".")[0]
            place = fits[unit][rank] if unit in fits else None
            if place is not None and str(place.owner) == owner:
                found[key] = stored
            elif unit == GROUPS:  # of other processes, for parameters that have moved here
                found[f"{GROUPS}.~{owner}/{key.removeprefix(GROUPS + '.')}"] = stored
        found.pop(PLACES, None)
        return found

    def _find_parts(self, known: set[str]) -> None:
        """Finds the parts of other files by the names of the model's parameters in the keys."""
        weights = Counter(key[:at] for key in self.keys for at in _begins(key) if key[at:] in known)
        self.model = _chosen(weights, ("model",), "the model's parameters")
        states = Counter(s for key in self.keys for s, name in _states(key) if name in known)
        if not states:  # as of SGD without momentum; but no states by numbers in place of names
            by_number = {start for key in self.keys for start, _ in _states(key)}
            groups = Counter(s for key in self.keys for s, _ in _after(key, "param_groups"))
            states = Counter({s: count for s, count in groups.items() if s not in by_number})
        self.optimizer = _chosen(states, ("optimizer", "optim"), "the optimizer's state")

    def _sort(self, parts: Set[str]) -> None:
        """Sorts the keys by what they belong to, in the same order on all processes.

        parts: the names at the top under which the model and the optimizer are.
        """
        state, group = f"{self.optimizer}state.", f"{self.optimizer}param_groups."
        # Where one of them is "", every key begins so.
        starts = tuple(start for start in (self.model, self.optimizer) if start is not None)
        for key in sorted(self.keys):
            start = state if key.startswith(state) else group
            name, _, entry = key.removeprefix(start).rpartition(".")
            if str(self.paths[key][0]) not in parts:  # "optimizer.x" is another part
                self.others.append(key)
            elif key.startswith(group):
                self.groups[key] = name, entry
            elif key.startswith(state) and name:
                self.states.setdefault(name, {})[entry] = key
            elif not key.startswith(starts):
                self.others.append(key)

    def empty(
        self, keys: Iterable[str], device: torch.device | None = None
    ) -> dict[str, Tensor | None]:
        """By key, a whole tensor to read into, or None for what is not a tensor."""
        found: dict[str, Tensor | None] = dict.fromkeys(keys)
        for key in found.keys() & self.tensors.keys():
            entry = self.tensors[key]
            found[key] = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
        return found


def _read_places(path: Path) -> dict[str, list[Home | None]]:
    from torch.distributed.checkpoint import state_dict_loader

    values: dict[str, Any] = {PLACES: None}
    failed = f"{path} could not be read; nothing was loaded"
    run(state_dict_loader.load, values, path, failed, alone=True)
    try:
        return tables(values[PLACES])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise _misfit(PLACES, error) from error


def _misfit(key: str, error: Exception) -> ValueError:
    wrong = f"does not fit what the checkpoint has ({type(error).__name__}: {error})"
    return ValueError(f"{key!r} {wrong}; nothing was loaded")


def _read(path: Path) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

    path = Path(os.path.realpath(path))
    if (path / ".metadata").exists():
        try:
            found = FileSystemReader(path).read_metadata()
            for each in found.state_dict_metadata.values():
                if not isinstance(each, TensorStorageMetadata | BytesStorageMetadata):
                    raise TypeError(f"it lists a {type(each).__name__}")
                if isinstance(each, TensorStorageMetadata):
                    attrgetter("size", "properties.dtype", "chunks")(each)
            for key, nested in dict(found.planner_data or {}).items():
                if not isinstance(nested, tuple | list) or not nested:
                    raise TypeError(f"it nests {key!r} as {nested!r}")
            return found
        except Exception as error:
            wrong = f"is damaged ({type(error).__name__}: {error}); nothing was loaded"
            raise ValueError(f"{path / '.metadata'} {wrong}") from error
    wrong = "is not a directory" if path.exists() and not path.is_dir() else "has no file .metadata"
    message = f"{path} {wrong}: it is not a checkpoint, or saving it was interrupted"
    kept = path.with_name(path.name + PREVIOUS)
    if (kept / ".metadata").exists():
        message += f". The checkpoint of before is in {kept}"
    raise FileNotFoundError(message)


def _chosen(starts: Counter[str], preferred: tuple[str, ...], what: str) -> str | None:
    """The start under which most names were found; among equals the one with a preferred name."""
    most = [start for start, count in starts.items() if count == max(starts.values())]
    for name in preferred:
        named = [start for start in most if start.rstrip(".").rpartition(".")[2] == name]
        most = named or most
    if len(most) > 1:
        raise ValueError(
            f"the checkpoint has {what} under {', '.join(map(repr, sorted(most)))}, and none of "
            f"them is named {preferred[0]!r}; nothing was loaded"
        )
    return most[0] if most else None


def _begins(key: str) -> list[int]:
    """Where each part of a key, between dots, begins."""
    return [0, *(at for at, before in enumerate(key, 1) if before == ".")]


def _after(key: str, word: str) -> list[tuple[str, str]]:
    """Splits the key at each ".word.": what is before it, and what is after it."""
    found = [at for at in _begins(key) if key.startswith(f"{word}.", at)]
    return [(key[:at], key[at + len(word) + 1 :]) for at in found]


def _states(key: str) -> list[tuple[str, str]]:
    """Splits "x.state.NAME.ENTRY" into ("x.", NAME), at each place where a state may begin."""
    found = [(start, rest.rpartition(".")[0]) for start, rest in _after(key, "state")]
    return [(start, name) for start, name in found if name]


def empty_like(value: Any, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """By name, a tensor to read into of each dtype, split and placed as the value is."""
    sharded, found = is_dtensor(value), {}
    local = local_of(value) if sharded else value
    for name, dtype in dtypes.items():
        own = torch.empty_like(local, dtype=dtype)
        found[name] = like(own, value) if sharded else own
    return found


def with_structure(state: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """A state to save, and with it the containers of `kept`, some of its values by name."""
    flat = flatten_state_dict(kept)
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
    if STRUCTURE not in values:  # written by torch
        return unflatten_state_dict(values, {key: contents.paths[key] for key in values})
    try:
        (named,) = values[STRUCTURE]
        left = contents.elsewhere - values.keys()  # other processes'
        return {name: _values(value, values, left) for name, value in named.items()}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise _misfit(STRUCTURE, error) from error


def _values(named: Any, values: dict[str, Any], left: set[str]) -> Any:
    if isinstance(named, str):
        return values[named]
    for each in [*named] if isinstance(named, Mapping) else range(len(named)):
        if isinstance(named[each], str) and named[each] in left:
            del named[each]
        else:
            named[each] = _values(named[each], values, left)
    return named
