"""Gradients' statistics, and a loss scale that is moved by them."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.scaling.policies import ScalePolicy

STUCK = 5  # overflows in a row at a scale that cannot fall
INCURABLE = 40  # overflows in a row at any scale: from 2^32 down to 1 there are 32 halvings


def by_device(tensors: list[Tensor]) -> dict[torch.device, list[int]]:
    """The tensors' indices, device by device: a native pass takes the tensors of one device."""
    indices: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        indices.setdefault(tensor.device, []).append(i)
    return indices


def measure(grads: list[Tensor]) -> dict[torch.device, Tensor]:
    """The statistics of all gradients together, one native read per device.

    float64 [3] per device: sum of squares, largest finite |g|, number of inf and NaN.
    """
    groups = by_device(grads).items()
    return {device: _C.measure([grads[i] for i in own])[-1] for device, own in groups}


def observe(totals: Mapping[torch.device, Tensor], scale: float) -> tuple[bool, float]:
    """Whether an element is inf or NaN, and the largest finite |g| / scale. Waits for the device.

    totals: what `measure` returned.
    """
    found_inf = any(bool(total[2] > 0) for total in totals.values())
    return found_inf, max((float(total[1]) for total in totals.values()), default=0.0) / scale


@dataclass
class OverflowCounter:
    """Steps so far, overflows in a row, and those of them that could not lower the loss scale."""

    steps: int = 0
    in_a_row: int = 0
    stuck: int = 0


def update_scale(
    policy: ScalePolicy,
    counter: OverflowCounter,
    found_inf: bool,
    max_abs: float,
    describe: Callable[[float], str],
) -> None:
    """Moves the scale after a step, and warns once where no loss scale can end the overflows.

    Args:
        policy: the loss scale.
        counter: of this policy's overflows.
        found_inf: whether a gradient was inf or NaN.
        max_abs: the largest finite unscaled |g|.
        describe: says which gradients are inf or NaN, given the scale they carry.
    """
    before = policy.scale
    policy.update(found_inf, max_abs)
    counter.steps += 1
    if not found_inf:
        counter.in_a_row = counter.stuck = 0
        return
    counter.in_a_row += 1
    counter.stuck = counter.stuck + 1 if policy.scale >= before else 0
    if counter.stuck != STUCK and counter.in_a_row != INCURABLE:
        return
    floor = ", which cannot fall further" if counter.stuck else ""
    warnings.warn(
        f"amp_mp: gradients have been inf or NaN in each of the last {counter.in_a_row} steps, "
        f"since step {counter.steps - counter.in_a_row + 1}, and the loss scale is "
        f"{policy.scale:g}{floor}: no scale can cure that. The gradients concerned, of this step:\n"
        f"{describe(before)}",
        stacklevel=3,
    )
