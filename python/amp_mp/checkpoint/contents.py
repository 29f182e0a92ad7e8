"""What is in a checkpoint directory, from its metadata alone: no data is read."""

from collections import Counter
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

PREVIOUS = ".previous"  # what `save` adds to the name of the checkpoint that it is replacing
STRUCTURE = "amp_mp.structure"  # the key under which `save` keeps containers: structure.py


class TensorInfo(NamedTuple):
    """A tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Contents:
    """The names of everything in a directory of torch.distributed.checkpoint.

    keys: of everything. tensors: those of them that are tensors. parts: the names at the top.
    model, optimizer: what stands before the names of parameters and before "state.NAME.ENTRY" in
    the keys, such as "model." and "optimizer."; None where there is no such part. They are found by
    the parameters' names, so the file may call the two as it likes.
    states: the keys of each parameter's optimizer state, by the parameter's name and by entry.
    paths: how each key was nested.
    """

    def __init__(self, path: str | PathLike[str], names: Iterable[str]) -> None:
        """names: of the model's parameters.

        Raises FileNotFoundError where there is no complete checkpoint, ValueError where several
        parts of it have the model's parameters.
        """
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        metadata = _read(Path(path))
        self.keys = set(metadata.state_dict_metadata)
        self.tensors = {
            key: TensorInfo(tuple(found.size), found.properties.dtype)
            for key, found in metadata.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }
        self.paths: dict[str, Any] = {key: (key,) for key in self.keys}
        self.paths |= metadata.planner_data or {}
        self.parts = {str(self.paths[key][0]) for key in self.keys - {STRUCTURE}}
        known = set(names)
        weights = Counter(start for key in self.keys for start in _starts(key, known))
        self.model = _chosen(weights, ("model",), "the model's parameters")
        states = Counter(s for key in self.keys for s, name, _ in _states(key) if name in known)
        if not states:  # as of SGD without momentum; but no states by numbers in place of names
            by_number = {start for key in self.keys for start, _, _ in _states(key)}
            groups = Counter(s for key in self.keys for s, _ in _after(key, "param_groups"))
            states = Counter({s: count for s, count in groups.items() if s not in by_number})
        self.optimizer = _chosen(states, ("optimizer", "optim"), "the optimizer's state")
        self.states: dict[str, dict[str, str]] = {}
        for key in sorted(self.keys):  # in the same order on all processes
            for start, name, entry in _states(key):
                if start == self.optimizer:
                    self.states.setdefault(name, {})[entry] = key

    def weight(self, name: str) -> str:
        """The key of a parameter or buffer of the model."""
        return f"{self.model}{name}"

    def groups(self) -> dict[str, tuple[str, str]]:
        """The keys of the optimizer's param_groups, each with the group's number and the setting.

        In files of flattened state dicts there is a parameter's name in place of a number.
        """
        found = ((key, rest) for key in self.keys for _, rest in _after(key, "param_groups"))
        own = {key: rest for key, rest in found if key.startswith(f"{self.optimizer}param_groups.")}
        return {key: _split(own[key]) for key in sorted(own)}

    def others(self) -> list[str]:
        """The keys of what is neither the model's nor the optimizer's."""
        if "" in (self.model, self.optimizer):
            return []
        own = tuple(start for start in (self.model, self.optimizer) if start)
        return sorted(key for key in self.keys if not key.startswith(own))


def _read(path: Path) -> Any:
    """The metadata of a directory."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if (path / ".metadata").exists():
        return FileSystemReader(path).read_metadata()
    wrong = "is no directory" if path.exists() and not path.is_dir() else "has no file .metadata"
    message = f"{path} {wrong}: it is no checkpoint, or saving it was interrupted"
    kept = path.with_name(path.name + PREVIOUS)
    if (kept / ".metadata").exists():
        message += f". The checkpoint of before is in {kept}"
    raise FileNotFoundError(message)


def _chosen(starts: Counter[str], preferred: tuple[str, ...], what: str) -> str | None:
    """The start under which most names were found; of several the one with a preferred name."""
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


def _starts(key: str, names: set[str]) -> Iterator[str]:
    """What stands in a key before one of the names, for every name that it ends with."""
    at = 0
    while at >= 0:
        if key[at:] in names:
            yield key[:at]
        at = key.find(".", at) + 1 or -1


def _states(key: str) -> Iterator[tuple[str, str, str]]:
    """Every way to read a key as START state.NAME.ENTRY."""
    for start, rest in _after(key, "state"):
        name, entry = _split(rest)
        if name:
            yield start, name, entry


def _after(key: str, word: str) -> Iterator[tuple[str, str]]:
    """What stands before and after a word between dots, wherever it is in the key."""
    at = f".{key}".find(f".{word}.")
    while at >= 0:
        yield key[:at], key[at + len(word) + 1 :]
        at = f".{key}".find(f".{word}.", at + 1)


def _split(text: str) -> tuple[str, str]:
    """What stands before and after the last dot."""
    before, _, after = text.rpartition(".")
    return before, after
