"""The parameters in an optimizer's param_groups, with their places and names for messages."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from amp_mp import _C


def params_in(groups: Iterable[dict[str, Any]]) -> list[Tensor]:
    """The parameters of all groups, in order."""
    return [param for group in groups for param in group["params"]]


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
