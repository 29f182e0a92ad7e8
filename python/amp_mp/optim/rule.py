"""What an optimizer declares about its update rule.

An optimizer class lists its rules; the step, the state, the checkpoints and gradient release read
the rule in force and never ask for the class.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

Group = dict[str, Any]  # one of torch's param_groups


class State(NamedTuple):
    """A tensor that a rule keeps for every parameter, of the parameter's shape.

    kind says what the tensor holds, and so how it may be stored (state/formats.py): "moment" is an
    average of gradients, "square" an average or sum of squares, "exact" is float32 always, "row" is
    float32, one number for each row of the parameter's matrices.
    initial names the number of the param_group that fills a new tensor; None fills it with zeros.
    late says that a parameter which has taken steps may lack it: a setting switches it on.
    """

    name: str
    kind: str
    initial: str | None = None
    late: bool = False


# Makes a step's updates of its directions, both as csrc/torch/step/step.h lays them out.
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


class OwnNumber(NamedTuple):
    """One number that a rule keeps for every parameter, and what it is before the first step."""

    name: str
    start: float


class Number(NamedTuple):
    """A number of the native step (core/rules/base.h, Hyper) and the group's entry that gives it.

    at: its place in an entry of several numbers. when: it is 0 where this entry is false.
    """

    native: str
    key: str
    at: int | None = None
    when: str | None = None


def numbers(*names: str, **renamed: str) -> tuple[Number, ...]:
    """The numbers of these names; `alpha="beta2"` passes the group's alpha as Hyper's beta2.

    A group's betas become beta1 and beta2.
    """
    found = []
    for name in names:
        betas = [Number("beta1", "betas", 0), Number("beta2", "betas", 1)]
        found += betas if name == "betas" else [Number(name, name)]
    return (*found, *(Number(native, name) for name, native in renamed.items()))


class Rule(NamedTuple):
    """An update rule.

    operator is the native operator's name in csrc/core/rules.h, numbers what it reads of a
    param_group, states are in the operator's order, and needs_norms says whether the rule uses the
    gradients' norms. own is what it keeps in Clock::own, if anything. directions is for rules that
    take two passes.
    """

    operator: str
    numbers: tuple[Number, ...]
    states: tuple[State, ...] = ()
    needs_norms: bool = False
    own: OwnNumber | None = None
    directions: Directions | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The states' names, torch's, in the operator's order."""
        return tuple(state.name for state in self.states)


def kinds_of(rules: Iterable[Rule]) -> dict[str, str]:
    """The kind of each state that any of the rules has, by the state's name."""
    return {state.name: state.kind for rule in rules for state in rule.states}


def choosable_states(rules: Iterable[Rule]) -> tuple[str, ...]:
    """The names of the states whose format may be chosen."""
    kinds = kinds_of(rules)
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
