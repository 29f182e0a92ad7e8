"""The update rules of an optimizer class, by the native operators' names.

The step, the state, the checkpoints and gradient release read the rule in force and never ask for
the class. csrc/core/rules declares what a rule keeps and reads.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from amp_mp import _C

Group = dict[str, Any]  # one of torch's param_groups


# Maps a step's directions to its updates, both laid out as in csrc/torch/step/step.h.
MakeUpdates = Callable[[Tensor], Tensor]
Shape = tuple[int, int]


class Directions(NamedTuple):
    """How a rule whose update is a whole matrix turns directions into updates.

    options: the group's entries that the other members look at. check raises ValueError for one
    that cannot be. shape_of gives the shape of the matrices that a parameter of a group consists
    of; parameters with equal ones lie side by side; refuse raises ValueError, with a label, for a
    parameter that consists of none. numbers: what Hyper has for matrices of a shape. make returns
    the function for these parameters, each with its group, in the order of the slots.
    """

    options: tuple[str, ...]
    check: Callable[[Group], None]
    refuse: Callable[[Group, Tensor, str], None]
    shape_of: Callable[[Group, Tensor], Shape]
    numbers: Callable[[Group, Shape], dict[str, Any]]
    make: Callable[[Sequence[tuple[Tensor, Group]]], MakeUpdates]


class Rule(NamedTuple):
    """An update rule: csrc/core/rules.h has its operator's name, csrc/core/rules what it declares.

    directions: for a rule that takes two passes. row_state: the state that has a float32 number for
    each row of the parameter's matrices; the native step knows nothing of them.
    """

    operator: str
    directions: Directions | None = None
    row_state: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The states' names, torch's, in the operator's order."""
        return tuple(_C.kinds_of([self]))

    @property
    def is_layerwise(self) -> bool:
        """Whether a step depends on norms of whole tensors."""
        return _C.is_layerwise(self)


NO_STATES = Rule("plain_sgd_")


def choosable_states(rules: Iterable[Rule]) -> tuple[str, ...]:
    """The names of the states whose format may be chosen."""
    kinds = _C.kinds_of(rules)
    return tuple(name for name in kinds if kinds[name] not in ("exact", "row"))


def same_in_all_groups(groups: list[Group], name: str) -> bool:
    """The truth value of a setting that chooses the rule, and so has to be equal in all groups.

    Raises ValueError naming the setting where groups differ.
    """
    for group in groups:
        if isinstance(group[name], Tensor) and group[name].numel() != 1:
            raise ValueError(f"{name} must be True or False, found {group[name]!r}")
    values = {bool(group[name]) for group in groups}
    if len(values) > 1:
        raise ValueError(f"{name} must be the same in all param_groups, found both")
    return values == {True}


def has_momentum(groups: list[Group]) -> bool:
    """Whether any group has momentum."""
    return any(group["momentum"] != 0 for group in groups)
