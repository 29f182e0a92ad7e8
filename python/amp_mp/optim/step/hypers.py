"""The groups' numbers as the native step takes them, renewed only where one has changed."""

from typing import Any

from torch import Tensor

from amp_mp import _C
from amp_mp.optim.rule import Group, Rule


class Hypers:
    """One _C.Hyper per param_group. Making one costs microseconds, and few change at a step."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[dict[str, Any], _C.Hyper]] = {}

    def of(self, rule: Rule, groups: list[Group]) -> list[_C.Hyper]:
        """The numbers of all groups."""
        return [self.one(rule, groups, index) for index in range(len(groups))]

    def one(self, rule: Rule, groups: list[Group], index: int) -> _C.Hyper:
        """The numbers of one group."""
        group = groups[index]
        numbers = rule.numbers(group)
        numbers["seed"], numbers["maximize"] = group["seed"], group["maximize"]
        known, hyper = self._known.get(index, (None, None))
        if known is None or hyper is None or not _same(known, numbers):
            hyper = _C.Hyper(**numbers)
            self._known[index] = numbers, hyper
        return hyper


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Equal names and numbers; tensors by identity, since comparing values would make CUDA wait."""
    if a.keys() != b.keys():
        return False
    for name, x in a.items():
        y = b[name]
        if x is not y and (isinstance(x, Tensor) or isinstance(y, Tensor) or x != y):
            return False
    return True
