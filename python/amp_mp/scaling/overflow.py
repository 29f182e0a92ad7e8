"""Which gradients are inf or NaN, and what to try."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.dtypes import NATIVE
from amp_mp.scaling.observe import by_device
from amp_mp.text_table import aligned


class NonFinite(NamedTuple):
    """A parameter with inf or NaN in its gradient; since: the first step of the present run."""

    name: str
    shape: tuple[int, ...]
    elements: int
    infs: int
    nans: int
    since: int | None = None


class OverflowReport(list[NonFinite]):
    """The parameters with inf or NaN in their gradients, in the model's order; it may be empty.

    scale: the loss scale that the gradients carry. Prints as a table and advice.
    """

    def __init__(self, rows: Iterable[NonFinite], scale: float) -> None:
        """See the class."""
        super().__init__(rows)
        self.scale = scale

    @property
    def advice(self) -> str:
        """What to try, in one or two sentences; empty without an overflow."""
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
        """One line per parameter, then the advice."""
        if not self:
            return "every gradient is finite"
        rows = (
            (
                row.name,
                str(row.shape),
                str(row.elements),
                str(row.infs),
                str(row.nans),
                "" if row.since is None else str(row.since),
            )
            for row in self
        )
        header = ("parameter", "shape", "elements", "inf", "NaN", "since step")
        return f"{aligned(header, rows)}\n{self.advice}"


@torch.no_grad()
def find_overflow(params: Iterable[tuple[str, Tensor]], scale: float) -> OverflowReport:
    """The parameters whose gradients have inf or NaN now.

    All gradients of a device are read once; those with an overflow again, to tell inf from NaN.
    Absent gradients, tensor subclasses and dtypes other than float32, float16 and bfloat16 are
    skipped; of a sparse gradient the values count.

    Args:
        params: names and parameters.
        scale: the loss scale that the gradients carry, for the advice.
    """
    names, shapes, grads = [], [], []
    for name, param in params:
        values = None if param.grad is None else plain(param.grad)
        if isinstance(values, Tensor):
            names.append(name)
            shapes.append(tuple(param.shape))
            grads.append(values)
    bad = []
    for indices in by_device(grads).values():
        rows = _C.measure([grads[i] for i in indices])
        if rows[-1, 2] > 0:
            bad += [i for i, row in zip(indices, rows[:-1, 2].tolist(), strict=True) if row > 0]
    infs = {i: int(grads[i].isinf().sum()) for i in bad}
    nans = {i: int(grads[i].isnan().sum()) for i in bad}
    return OverflowReport(
        (NonFinite(names[i], shapes[i], grads[i].numel(), infs[i], nans[i]) for i in sorted(bad)),
        scale,
    )


def plain(grad: Tensor) -> Tensor | str:
    """The dense values of a gradient, or a word for the kind that cannot be counted."""
    if grad.is_sparse:
        grad = grad.detach().coalesce().values()
    if type(grad) not in (Tensor, nn.Parameter):
        return f"a tensor subclass, {type(grad).__name__}"
    return grad if grad.dtype in NATIVE else str(grad.dtype).removeprefix("torch.")


def scale_text(scale: float) -> str:
    """A scale as text, as a power of two where it is one."""
    fraction, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if fraction == 0.5 else f"{scale:g}"
