"""What is in a checkpoint directory, from its metadata alone: no data is read."""

from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

TRIED = 8  # how many names are looked for to find where names begin


class Entry(NamedTuple):
    """A tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Contents:
    """The names of everything in a directory of torch.distributed.checkpoint.

    model, optimizer: what stands before the names of parameters and before "state.NAME.ENTRY" in
    the keys, such as "model." and "optimizer."; None where there is no such part. So files are read
    that were written as dcp.save({"model": ..., "optim": ...}), whatever the two are called there.
    """

    def __init__(self, path: str | PathLike[str], names: Iterable[str]) -> None:
        """names: of the model's parameters. FileNotFoundError where there is no checkpoint."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        if not (Path(path) / ".metadata").exists():
            raise FileNotFoundError(
                f"{path} is no directory of torch.distributed.checkpoint, or its save was "
                "interrupted: there is no file .metadata in it"
            )
        metadata = FileSystemReader(path).read_metadata()
        self.keys = set(metadata.state_dict_metadata)
        self.tensors = {
            key: Entry(tuple(found.size), found.properties.dtype)
            for key, found in metadata.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }
        self._paths: dict[str, Any] = metadata.planner_data or {}
        names = list(names)
        starts = {key[: key.rindex(n)] for n in names[:TRIED] for key in self.keys if _ends(key, n)}
        self.model = self._most(
            starts, lambda start: sum(start + name in self.keys for name in names)
        )
        marks = [f"state.{name}." for name in names[:TRIED]]
        starts = {key[: key.index(m)] for m in marks for key in self.keys if f".{m}" in f".{key}"}
        states = {key.rpartition(".")[0] for key in self.tensors}
        self.optimizer = self._most(
            starts, lambda start: sum(f"{start}state.{name}" in states for name in names)
        )

    def _most(self, starts: set[str], count: Callable[[str], int]) -> str | None:
        """The start under which most names are found, of several the shortest."""
        return max(starts, key=lambda start: (count(start), -len(start)), default=None)

    def states(self, name: str) -> dict[str, str]:
        """The keys of a parameter's optimizer state, by entry."""
        if self.optimizer is None:
            return {}
        start = f"{self.optimizer}state.{name}."
        found = {key.removeprefix(start): key for key in self.tensors if key.startswith(start)}
        return {entry: key for entry, key in found.items() if "." not in entry}

    def stepped(self) -> set[str]:
        """The names of the parameters that have an optimizer's state."""
        if self.optimizer is None:
            return set()
        start = f"{self.optimizer}state."
        own = (key.removeprefix(start) for key in self.tensors if key.startswith(start))
        return {key.rpartition(".")[0] for key in own}

    def entry_of(self, key: str) -> str:
        """The entry of a key of `states`: exp_avg, remainder16."""
        return key.rpartition(".")[2]

    def keys_of_groups(self) -> list[str]:
        """The keys of the optimizer's param_groups."""
        return sorted(key for key in self.keys if key.startswith(f"{self.optimizer}param_groups."))

    def settings(self, values: dict[str, Any], names: list[str]) -> dict[str, Any]:
        """The numbers of the param_group that holds these parameters.

        values: what was read of keys_of_groups. ValueError where they are in several groups.
        """
        start = f"{self.optimizer}param_groups."
        groups: dict[str, dict[str, Any]] = {}
        for key in self.keys_of_groups():
            owner, _, setting = key.removeprefix(start).rpartition(".")
            groups.setdefault(owner, {})[setting] = values[key]
        flat = [groups[name] for name in names if name in groups]  # one entry a parameter
        if flat:
            return dict(flat[0])
        found = [own for own in groups.values() if set(names) & set(own.get("params", ()))]
        if names and (len(found) != 1 or not set(names) <= set(found[0]["params"])):
            raise ValueError(
                f"the param_group of {names[0]!r} has other parameters in the checkpoint than here;"
                " make the optimizer with the groups that it was saved with"
            )
        return {k: v for own in found for k, v in own.items() if k != "params"}

    def parts(self) -> set[str]:
        """The names at the top: "model", "optimizer" and more."""
        return {str(path[0]) for path in self._paths.values()}

    def keys_of_more(self) -> list[str]:
        """The keys of what is neither the model's nor the optimizer's."""
        own = tuple(start for start in (self.model, self.optimizer) if start)
        bare = "" in (self.model, self.optimizer)
        return [] if bare else [key for key in self._paths if not key.startswith(own)]

    def nested(self, values: dict[str, Any]) -> dict[str, Any]:
        """Values by key as the dicts and lists that were saved."""
        from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

        return unflatten_state_dict(values, {key: self._paths[key] for key in values})


def _ends(key: str, name: str) -> bool:
    return f".{key}".endswith(f".{name}") and ".state." not in f".{key}"
