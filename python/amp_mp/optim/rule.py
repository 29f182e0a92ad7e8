"""What an optimizer declares about its update rule.

An optimizer class lists its rules; the step, the state, the checkpoints and gradient release read
the rule in force and never ask for the class.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from amp_mp.optim.state.entries import is_held

Group = dict[str, Any]  # one of torch's param_groups


@dataclass(frozen=True)
class State:
    """A tensor that a rule keeps for every parameter, of the parameter's shape.

    kind says what the tensor holds, and so how it may be stored (state/formats.py): "moment" is an
    average of gradients, "square" an average or sum of squares, "exact" is float32 always.
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


@dataclass(frozen=True)
class Directions:
    """How a rule whose update is a whole matrix turns directions into updates.

    shape_of gives the shape of the matrices that a parameter of a group consists of; parameters
    with equal ones lie side by side; refuse raises ValueError, with a label, for a parameter that
    consists of none. Both look at the group's entries `options`. numbers: what Hyper has for
    matrices of a shape. make returns the function for these parameters, each with its group, in the
    order of the slots.
    """

    options: tuple[str, ...]
    refuse: Callable[[Group, Tensor, str], None]
    shape_of: Callable[[Group, Tensor], Shape]
    numbers: Callable[[Group, Shape], dict[str, Any]]
    make: Callable[[Sequence[tuple[Tensor, Group]]], MakeUpdates]


@dataclass(frozen=True)
class OwnNumber:
    """One number that a rule keeps for every parameter, and what it is before the first step."""

    name: str
    start: float


@dataclass(frozen=True)
class Rule:
    """An update rule.

    operator is the native operator's name in csrc/core/rules.h, numbers turns a param_group into
    the keyword arguments of _C.Hyper, states are in the operator's order, and needs_norms says
    whether the rule uses the gradients' norms. own is what it keeps in Clock::own, if anything.
    directions is for rules that take two passes.
    """

    operator: str
    numbers: Callable[[Group], dict[str, Any]]
    states: tuple[State, ...] = ()
    needs_norms: bool = False
    own: OwnNumber | None = None
    directions: Directions | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The states' names, torch's, in the operator's order."""
        return tuple(state.name for state in self.states)


def missing_states(rules: Iterable[Rule], state: Mapping[str, Any]) -> list[str]:
    """What every parameter keeps after a step under any of the rules, and this one lacks.

    state: a parameter's state. One that has taken no step lacks nothing: its states are made.
    """
    named = []
    for rule in rules:
        kept = {each.name for each in rule.states if not each.late}
        named.append(kept | ({rule.own.name} if rule.own is not None else set()))
    missing = sorted(name for name in set.intersection(*named) if not is_held(state, name))
    return missing if missing and float(state.get("step") or 0) > 0 else []


def numbers(*names: str, **renamed: str) -> Callable[[Group], dict[str, Any]]:
    """Picks a group's numbers by name; `alpha="beta2"` passes the group's alpha as Hyper's beta2.

    A group's betas become beta1 and beta2.
    """

    def of(group: Group) -> dict[str, Any]:
        found = {name: group[name] for name in names if name != "betas"}
        if "betas" in names:
            found["beta1"], found["beta2"] = group["betas"]
        return found | {native: group[name] for name, native in renamed.items()}

    return of


def kinds_of(rules: Iterable[Rule]) -> dict[str, str]:
    """The kind of each state that any of the rules has, by the state's name."""
    return {state.name: state.kind for rule in rules for state in rule.states}


def same_in_all_groups(groups: list[Group], name: str) -> bool:
    """The truth value of a setting that chooses the rule, and so has to be equal in all groups.

    Raises ValueError naming the setting where groups differ.
    """
    values = {bool(group[name]) for group in groups}
    if len(values) > 1:
        raise ValueError(f"{name} must be the same in all param_groups, found both")
    return values == {True}


def has_momentum(groups: list[Group]) -> bool:
    """Whether any group has momentum."""
    return any(group["momentum"] != 0 for group in groups)
