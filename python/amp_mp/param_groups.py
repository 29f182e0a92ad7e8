"""The parameters in an optimizer's param_groups, with their places and names for messages."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from amp_mp import _C


def params_in(groups: Iterable[dict[str, Any]]) -> list[Tensor]:
    """The parameters of all groups, in order."""
    return [param for group in groups for param in group["params"]]


LOW_PARAMS = "_amp_mp_low_params"  # the attribute of an optimizer


def low_params(optimizer: Any) -> dict[Tensor, Tensor]:
    """The parameter of each master in param_groups, which all wrappers of the optimizer share.

    Not an attribute of the master: a weight's record has the master, and would keep the weight.
    """
    found: dict[Tensor, Tensor] = vars(optimizer).setdefault(LOW_PARAMS, {})
    return found


def stepped_params(optimizers: Iterable[Any]) -> set[Any]:
    """The parameters that optimizers go on with: they have state, or masters in param_groups."""
    found: set[Any] = set()
    for each in optimizers:
        found.update(param for param, state in each.state.items() if state)
        while (inner := getattr(each, "optimizer", None)) is not None:  # in FP16_Optimizer, LARC
            each = inner
        found.update(vars(each).get(LOW_PARAMS, {}).values())
    return found


class ParamInfo(NamedTuple):
    """Where a parameter is in its optimizer."""

    group: int
    tensor_index: int  # among all parameters
    label: str  # for messages


def param_infos(groups: Iterable[dict[str, Any]]) -> Iterator[tuple[Tensor, ParamInfo]]:
    """Every parameter with its place, in order."""
    index = 0
    for number, group in enumerate(groups):
        for param, label in labelled(group, number):
            yield param, ParamInfo(number, index, label)
            index += 1


def labelled(group: dict[str, Any], number: int) -> Iterator[tuple[Tensor, str]]:
    """The parameters of a group, each with what messages call it; number: the group's place."""
    for position, param in enumerate(_C.params_of(group)):
        yield param, _C.param_label(group, number, position)
