"""Where parameters are among an optimizer's groups, for steps of one alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.optim.attach import NATIVE

if TYPE_CHECKING:
    from amp_mp.optim.base import FusedOptimizer


class Place(NamedTuple):
    """Where a parameter is in its optimizer."""

    group: int
    number: int  # among all parameters
    label: str


def places_of(optimizer: FusedOptimizer) -> Iterator[tuple[Tensor, Place]]:
    """Every parameter with its place, in order."""
    number = 0
    for index, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        for position, param in enumerate(group["params"]):
            label = f"parameter {position} of group {index}"
            label += f" ({given[position]!r})" if given else ""
            yield param, Place(index, number, label)
            number += 1


def check_memory(places: dict[Tensor, Place]) -> None:
    """Raises ValueError where two parameters share memory, which no step of one alone sees."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for param in places:
        if param.requires_grad and param.dtype in NATIVE:
            by_device.setdefault(param.device, []).append(param)
    for device, params in by_device.items():
        count = len(params)
        _C.Slots(
            params=params,
            masters=[None] * count,
            states=[],
            scales=[None] * count,
            formats=[],
            stochastic=[False] * count,
            clocks=list(torch.zeros(count, 4, dtype=torch.float64, device=device)),
            groups=[0] * count,
            numbers=[0] * count,
            firsts=[0] * count,
            names=[places[param].label for param in params],
        )
