"""Gradients' statistics, a loss scale that is moved by them, and which gradients are inf or NaN."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.dtypes import NATIVE
from amp_mp.scaling.policies import ScalePolicy
from amp_mp.sharding.shards import is_dtensor, local_of
from amp_mp.text_table import aligned, dtype_name, scale_text

STUCK = 5  # overflows in a row at a scale that cannot fall
SKIPS = 25  # steps in a row that change nothing
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
    return {d: _C.measure([grads[i] for i in own])[-1] for d, own in by_device(grads).items()}


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

    max_abs: the largest finite unscaled |g|. describe: says which gradients are inf or NaN, given
    the scale they carry.
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


class SkipWarning:
    """Warns once per streak of skipped steps, when it is SKIPS long."""

    def __init__(self) -> None:
        self._warned = 0  # the first step of the streak that was warned of

    def count(self, name: str, step: int, in_a_row: int, describe: Callable[[], str]) -> None:
        """Takes notice of a step that was the last of `in_a_row` skipped ones; 0: not skipped.

        name: what skipped it. describe: says which gradients are inf or NaN, for the warning.
        """
        first = step - in_a_row + 1
        if in_a_row < SKIPS or first == self._warned:
            return
        self._warned = first
        warnings.warn(
            f"amp_mp: {name} has skipped {in_a_row} steps in a row, since step {first}: gradients "
            "are inf or NaN, nothing is updated, and training stands still. The gradients "
            f"concerned, of this step:\n{describe()}",
            stacklevel=4,
        )


class NonFinite(NamedTuple):
    """A parameter whose gradient has inf or NaN, how many elements it has, and how many are bad.

    since: the first of the steps in a row in which it was so, where an OverflowTracker knows it.
    """

    name: str
    shape: tuple[int, ...]
    elements: int
    infs: int
    nans: int
    since: int | None = None


class OverflowReport(list[NonFinite]):
    """The parameters with non-finite gradients, in the model's order; empty if there are none.

    scale: the loss scale that the gradients were computed with. of_shards: whether some parameters
    are DTensors, of which the shards on this process were read. Prints as a table and what to try.
    """

    def __init__(self, rows: Iterable[NonFinite], scale: float, *, of_shards: bool = False) -> None:
        super().__init__(rows)
        self.scale, self.of_shards = scale, of_shards

    @property
    def advice(self) -> str:
        """What to try, in a sentence or two; empty without an overflow."""
        if not self:
            return ""
        last = self[-1].name
        if not any(row.infs for row in self):
            return (
                f"There are NaN and no inf: look for the NaN in the forward pass or the data, near "
                f"{last} first, the last in the model and so the closest to the loss "
                "(torch.autograd.set_detect_anomaly(True) names the operation)."
            )
        if self.scale > 1:
            return (
                f"Gradients exceed the format at loss scale {scale_text(self.scale)}: lower the "
                "scale and skip this step, as a dynamic scale does by itself."
            )
        return (
            f"Gradients are inf without a loss scale to lower: keep the layers around {last} in "
            "float32, or use bfloat16, which has float32's range."
        )

    def __str__(self) -> str:
        if not self:
            where = " on this process" if self.of_shards else ""
            rest = "; the shards of other processes were not read" if self.of_shards else ""
            return f"every gradient{where} is finite{rest}"
        header = ("parameter", "shape", "elements", "inf", "NaN", "since step")
        shards = "\nOnly the shards of this process were read." if self.of_shards else ""
        return f"{aligned(header, self)}{shards}\n{self.advice}"


@torch.no_grad()
def nonfinite_gradients(params: Iterable[tuple[str, Tensor]], scale: float) -> OverflowReport:
    """The report on named parameters whose gradients carry the loss scale.

    Each device reads all its gradients in one native pass; gradients with inf or NaN are read again
    to count both. `dense_values` says which gradients are skipped.
    """
    given = list(params)
    found = [
        (name, param.shape, values)
        for name, param in given
        if param.grad is not None and isinstance(values := dense_values(param.grad), Tensor)
    ]
    bad: list[int] = []
    for indices in by_device([values for _, _, values in found]).values():
        counts = _C.measure([found[i][2] for i in indices])[:-1, 2].tolist()
        bad += [i for i, count in zip(indices, counts, strict=True) if count > 0]
    rows = (
        NonFinite(name, tuple(shape), x.numel(), int(x.isinf().sum()), int(x.isnan().sum()))
        for name, shape, x in (found[i] for i in sorted(bad))
    )
    return OverflowReport(rows, scale, of_shards=any(is_dtensor(param) for _, param in given))


def describe_nonfinite(
    param_groups: Iterable[list[dict[str, Any]]],
    scale: float,
    model_param: Callable[[Tensor], Tensor] = lambda p: p,
) -> str:
    """Which gradients are inf or NaN; a parameter without a name is given by its position.

    param_groups: of each optimizer.
    """
    found: list[tuple[str, Tensor]] = []
    for index, group in [pair for groups in param_groups for pair in enumerate(groups)]:
        params = [model_param(param) for param in group["params"]]
        positions = [f"parameter {i} of group {index}" for i in range(len(params))]
        found += zip(group.get("param_names") or positions, params, strict=True)
    report = nonfinite_gradients(found, scale)
    if not report and any(is_dtensor(param) for _, param in found):
        return "every gradient on this process is finite; those concerned are on another process"
    return str(report)


def dense_values(grad: Tensor) -> Tensor | str:
    """A gradient's dense values, or a text saying why it cannot be read.

    Of a sparse one its values after coalescing, of a DTensor this process's shard. Other subclasses
    and dtypes other than float16, bfloat16 and float32 cannot be read.
    """
    grad = local_of(grad)
    if grad.is_sparse:
        grad = grad.detach().coalesce().values()
    if type(grad) not in (Tensor, nn.Parameter):
        return f"a tensor subclass, {type(grad).__name__}"
    return grad if grad.dtype in NATIVE else dtype_name(grad.dtype)
