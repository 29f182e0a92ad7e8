"""The update rules of an optimizer class, by the native operators' names.

The step, the state, the checkpoints and gradient release read the rule in force and never ask for
the class. csrc/core/rules declares what a rule keeps and reads.
"""

from collections.abc import Callable, Sequence
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
    numbers: Callable[[Group, Shape], dict[str, float]]
    make: Callable[[Sequence[tuple[Tensor, Group]]], MakeUpdates]

    def matrices(self, group: Group, param: Tensor) -> tuple[Shape, dict[str, float]]:
        """The shape of a parameter's matrices, and what Hyper has for such."""
        shape = self.shape_of(group, param)
        return shape, self.numbers(group, shape)


class Rule(_C.Rule):
    """An update rule: a header of csrc/core/rules declares it, and ends with its operator's name.

    directions: for a rule that takes two passes, else None.
    """

    def __init__(
        self, operator: str, directions: Directions | None = None, row_state: str | None = None
    ) -> None:
        """ValueError for a name that no operator has.

        row_state: the state that has a float32 number for each row of the parameter's matrices.
        """
        options = () if directions is None else directions.options
        super().__init__(operator, row_state=row_state, options=options)
        self.operator, self.directions = operator, directions

    @property
    def names(self) -> tuple[str, ...]:
        """The states' names, torch's, in the operator's order."""
        return tuple(self.kinds)

    def __repr__(self) -> str:
        return f"Rule({self.operator!r})"


NO_STATES = Rule("plain_sgd_")


def is_on(group: Group, name: str) -> bool:
    """Whether a setting that chooses the rule is on; ValueError, by name, where it is no flag."""
    value = group.get(name)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name} must be True or False, found {value!r}")
    return bool(value)


def choosable_states(rules: Sequence[Rule]) -> tuple[str, ...]:
    """The names of the states whose format may be chosen."""
    kinds = _C.kinds_of(rules)
    return tuple(name for name in kinds if kinds[name] not in ("exact", "row"))
