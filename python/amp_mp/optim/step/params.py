"""Every parameter of an optimizer with its place, and the name that messages give it."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from amp_mp import _C
from amp_mp.optim.rule import Group


class ParamInfo(NamedTuple):
    """Where a parameter is in its optimizer."""

    group: int
    tensor_index: int  # among all parameters
    label: str  # for messages


def param_infos(groups: list[Group]) -> Iterator[tuple[Tensor, ParamInfo]]:
    """Every parameter with its place, in order."""
    index = 0
    for number, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            yield param, ParamInfo(number, index, _C.param_label(group, number, position))
            index += 1
