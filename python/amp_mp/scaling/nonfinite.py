"""Which gradients are inf or NaN, and what to try."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.dtypes import NATIVE
from amp_mp.scaling.observe import by_device
from amp_mp.text_table import aligned, dtype_name, scale_text


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

    scale: the loss scale that the gradients were computed with. Prints as a table and what to try.
    """

    def __init__(self, rows: Iterable[NonFinite], scale: float) -> None:
        super().__init__(rows)
        self.scale = scale

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
            return "every gradient is finite"
        header = ("parameter", "shape", "elements", "inf", "NaN", "since step")
        return f"{aligned(header, self)}\n{self.advice}"


@torch.no_grad()
def nonfinite_gradients(params: Iterable[tuple[str, Tensor]], scale: float) -> OverflowReport:
    """The report on named parameters whose gradients carry the loss scale.

    Each device reads all its gradients in one native pass; gradients with inf or NaN are read again
    to count both. `dense_values` says which gradients are skipped.
    """
    found: list[tuple[str, Tensor, Tensor]] = []
    for name, param in params:
        if param.grad is not None and isinstance(values := dense_values(param.grad), Tensor):
            found.append((name, param, values))
    bad: list[int] = []
    for indices in by_device([values for _, _, values in found]).values():
        counts = _C.measure([found[i][2] for i in indices])[:-1, 2].tolist()
        bad += [i for i, count in zip(indices, counts, strict=True) if count > 0]
    rows = (
        NonFinite(name, tuple(param.shape), x.numel(), int(x.isinf().sum()), int(x.isnan().sum()))
        for name, param, x in (found[i] for i in sorted(bad))
    )
    return OverflowReport(rows, scale)


def dense_values(grad: Tensor) -> Tensor | str:
    """The gradient, or a sparse one's values after coalescing; a text saying why it cannot be read.

    Tensor subclasses, and dtypes other than float16, bfloat16 and float32, cannot be read.
    """
    if grad.is_sparse:
        grad = grad.detach().coalesce().values()
    if type(grad) not in (Tensor, nn.Parameter):
        return f"a tensor subclass, {type(grad).__name__}"
    return grad if grad.dtype in NATIVE else dtype_name(grad.dtype)
