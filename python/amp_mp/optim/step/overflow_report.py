"""Reports of overflows: which gradients are inf or NaN, and what to try."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.dtypes import NATIVE
from amp_mp.module_names import prepared_models
from amp_mp.sharding.gradients import by_device
from amp_mp.sharding.shards import any_dtensor, local_of
from amp_mp.text_table import aligned, dtype_name, scale_text


class NonFinite(NamedTuple):
    """A parameter whose gradient has inf or NaN."""

    name: str
    shape: tuple[int, ...]
    elements: int
    infs: int
    nans: int
    since: int | None = None  # the first of such steps in a row, from an OverflowTracker


class OverflowReport(list[NonFinite]):
    """The parameters with non-finite gradients, in the model's order. Prints as a table and advice.

    scale: the loss scale of the gradients. of_shards: whether some parameters are DTensors, of
    which the shards on this process were read.
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
                f"{last} first, the last in the model and so the closest to the loss (`python -m "
                "amp_mp.diagnose` names the first module whose output is not finite)."
            )
        if self.scale > 1:
            return (
                f"Gradients exceed the format at loss scale {scale_text(self.scale)}: lower the "
                "scale and skip this step, as a dynamic scale does by itself."
            )
        where = f"also at loss scale {scale_text(self.scale)}"
        if self.scale == 1:
            where = "without a loss scale to lower"
        return (
            f"Gradients are inf {where}: keep the layers around {last} in float32, or use "
            "bfloat16, which has float32's range."
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
    to count both. Those that `dense_values` cannot read are skipped.
    """
    given = list(params)
    read = [(n, p.shape, dense_values(p.grad)) for n, p in given if p.grad is not None]
    found = [(name, shape, x) for name, shape, x in read if isinstance(x, Tensor)]
    rows: dict[int, NonFinite] = {}
    for indices in by_device([x for _, _, x in found]).values():
        counts = _C.measure([found[i][2] for i in indices])[:-1, 2].tolist()
        for i in (i for i, count in zip(indices, counts, strict=True) if count > 0):
            name, shape, x = found[i]
            infs, nans = int(x.isinf().sum()), int(x.isnan().sum())
            rows[i] = NonFinite(name, tuple(shape), x.numel(), infs, nans)
    of_shards = any_dtensor(param for _, param in given)
    return OverflowReport((rows[i] for i in sorted(rows)), scale, of_shards=of_shards)


def describe_nonfinite(
    param_groups: Iterable[list[dict[str, Any]]],
    scale: float,
    model_param: Callable[[Tensor], Tensor] = lambda p: p,
) -> str:
    """Which gradients of these groups are inf or NaN; names: a prepared model's, or the groups'."""
    found: list[tuple[str, Tensor]] = []
    paths = {id(p): path for model in prepared_models for path, p in model.named_parameters()}
    for number, group in [pair for groups in param_groups for pair in enumerate(groups)]:
        given = dict(enumerate(group.get("param_names") or ()))
        for i, param in enumerate(map(model_param, group["params"])):
            label = paths.get(id(param)) or given.get(i) or _C.param_label(group, number, i)
            found.append((label, param))
    report = nonfinite_gradients(found, scale)
    if not report and any_dtensor(param for _, param in found):
        return "every gradient on this process is finite; those concerned are on another process"
    return str(report)


def dense_values(grad: Tensor) -> Tensor | str:
    """A gradient's values in float16, bfloat16 or float32, or a text saying why it has none.

    Of a sparse one its values after coalescing, of a DTensor this process's shard.
    """
    grad = local_of(grad)
    if grad.is_sparse:
        grad = grad.detach().coalesce().values()
    if type(grad) not in (Tensor, nn.Parameter):
        return f"a tensor subclass, {type(grad).__name__}"
    return grad if grad.dtype in NATIVE else dtype_name(grad.dtype)
