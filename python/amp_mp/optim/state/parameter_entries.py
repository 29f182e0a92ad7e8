"""Entries beside parameters, which end with them: for plain parameters and for DTensors."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from amp_mp.sharding.shards import is_dtensor

T = TypeVar("T")


@dataclass
class Mark:
    """What outlives a plain parameter: whether it had an entry at its end, and one with values."""

    waits: bool = True
    has_values: bool = False


class ParameterEntries(Generic[T]):
    """One entry a parameter.

    A plain parameter's entry is found by a weak reference. A DTensor must have none, because
    model.to() and to_empty() exchange the insides of two DTensors, which torch refuses for
    tensors with weak references. The module that owns the parameter stands for it: the entry
    ends with the module.
    """

    def __init__(self) -> None:
        self._plain: MutableMapping[Tensor, tuple[T | None, Mark]] = WeakTensorKeyDictionary()
        self._sharded: MutableMapping[nn.Module, dict[int, tuple[Tensor, T | None]]]
        self._sharded = WeakKeyDictionary()
        self._marks: MutableMapping[nn.Module, dict[str, Mark]] = WeakKeyDictionary()

    def __contains__(self, param: Tensor) -> bool:
        return self._records(param) is not None if is_dtensor(param) else param in self._plain

    def get(self, param: Tensor) -> T | None:
        """The parameter's entry, or None where it has none or an empty one."""
        if is_dtensor(param):
            records = self._records(param)
            return None if records is None else records[id(param)][1]
        found = self._plain.get(param)
        return None if found is None else found[0]

    def put(self, param: Tensor, entry: T | None, owner: nn.Module | None = None) -> None:
        """Sets the parameter's entry. owner: its module, which a DTensor's first entry needs."""
        if is_dtensor(param):
            records = self._records(param)
            if records is None:
                assert owner is not None, "a DTensor's first entry needs its module"
                records = self._sharded.setdefault(owner, {})
            records[id(param)] = param, entry
            return
        found = self._plain.get(param)
        mark = Mark() if found is None else found[1]
        mark.has_values = entry is not None
        self._plain[param] = entry, mark

    def pop(self, param: Tensor) -> None:
        """Ends the parameter's entry."""
        if is_dtensor(param):
            while (records := self._records(param)) is not None:
                del records[id(param)]
        elif param in self._plain:
            mark = self._plain.pop(param)[1]
            mark.waits = mark.has_values = False

    def mark(self, module: nn.Module, params: Mapping[str, Tensor]) -> None:
        """Notes a module's plain parameters, so that `replaced_in` knows them after their end."""
        plain = {name: p for name, p in params.items() if not is_dtensor(p) and p in self._plain}
        self._marks[module] = {name: self._plain[p][1] for name, p in plain.items()}

    def replaced_in(self, module: nn.Module) -> dict[str, bool]:
        """The module's DTensors that replaced plain parameters with entries, and got none yet.

        By name: whether values were lost with the entry.
        """
        marks = self._marks.get(module, {})
        now = {n: p for n, p in module._parameters.items() if n in marks and p is not None}
        waiting = {n: p for n, p in now.items() if marks[n].waits and is_dtensor(p)}
        return {n: marks[n].has_values for n, p in waiting.items() if p not in self}

    def owner_of_lost(self, param: Tensor) -> str:
        """The module's class and the name of a DTensor whose values were lost; else empty."""
        for module in list(self._marks):
            for name, lost in self.replaced_in(module).items():
                if lost and module._parameters[name] is param:
                    return f"{type(module).__name__}.{name}"
        return ""

    def _records(self, param: Tensor) -> dict[int, tuple[Tensor, T | None]] | None:
        return next((each for each in self._sharded.values() if id(param) in each), None)
