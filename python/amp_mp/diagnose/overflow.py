"""Which gradients are inf or NaN, since when, and whether a loss scale can help."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.diagnose.report import number
from amp_mp.diagnose.watch import plain, scale_of
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
    """The parameters with non-finite gradients, in the model's order; empty is good news.

    scale: the loss scale that they were computed with. Prints as a table and what to try.
    """

    def __init__(self, rows: Iterable[NonFinite], scale: float) -> None:
        """See the class."""
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
                f"Gradients exceed the format at loss scale {number(self.scale)}: lower the scale "
                "and skip this step, as a dynamic scale does by itself."
            )
        return (
            f"Gradients are inf without a loss scale to lower: keep the layers around {last} in "
            "float32, or use bfloat16, which has float32's range."
        )

    def __str__(self) -> str:
        """A line each, then what to try."""
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


Named = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@torch.no_grad()
def diagnose_overflow(params: Named, scale: Any = None) -> OverflowReport:
    """Which gradients have inf or NaN now: call it between backward and the step.

    Overflow is decided element by element. One native read of all gradients of a device; those
    that have overflowed are read again to tell inf from NaN. Absent gradients are skipped, sparse
    ones count by their values; tensor subclasses, and dtypes but float32, float16 and bfloat16, are
    skipped too.

    Args:
        params: a module, or parameters by name: a mapping or pairs.
        scale: the loss scale of the gradients, for the advice: anything `watch` takes.
    """
    names, shapes, grads = [], [], []
    for name, param in named(params):
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
    return OverflowReport(
        (
            NonFinite(
                names[i],
                shapes[i],
                grads[i].numel(),
                int(grads[i].isinf().sum()),
                int(grads[i].isnan().sum()),
            )
            for i in sorted(bad)
        ),
        scale_of(scale),
    )


def named(params: Named) -> list[tuple[str, Tensor]]:
    """Names and parameters; TypeError if it is neither a module nor parameters by name."""
    if isinstance(params, nn.Module):
        return list(params.named_parameters())
    pairs = list(params.items() if isinstance(params, Mapping) else params)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)):
            raise TypeError(
                "expected a module or named parameters (model.named_parameters()), "
                f"found {type(pair).__name__} among them"
            )
    return pairs


class OverflowTracker:
    """Follows overflows over steps and says when no loss scale can cure them.

        tracker = diagnose.OverflowTracker(model, scaler)
        ...
        loss.backward()
        tracker.update()
        if tracker.verdict:
            raise RuntimeError(tracker.verdict)

    Args:
        params: a module, or parameters by name.
        scaler: what holds the loss scale: anything `watch` takes.
        patience: for how many steps in a row a parameter has to be non-finite, while the scale
            falls, to count as incurable. A scale that starts at 2^24 needs up to 24 halvings to
            find its place, so the default is one more.
        floor_patience: for how many overflowing steps in a row a scale has to stay the same to
            count as stuck.
    """

    def __init__(
        self, params: Named, scaler: Any = None, patience: int = 25, floor_patience: int = 5
    ) -> None:
        """See the class; raises ValueError for a patience below 2, TypeError as `named` does."""
        if min(patience, floor_patience) < 2:
            raise ValueError(
                f"patience must be 2 or more, found {patience!r} and {floor_patience!r}"
            )
        self._params = named(params)
        self._scaler = scaler
        self._patience, self._floor_patience = patience, floor_patience
        self._began: dict[str, tuple[int, float]] = {}  # since which step, and the scale there
        self._same_since = 0  # the first step of those that overflowed at one and the same scale
        self.steps = 0
        self.report = OverflowReport((), scale_of(scaler))

    def update(self) -> OverflowReport:
        """Call it after backward, before the scale moves; returns the step's report.

        Steps are counted from 1, a call each.
        """
        before, self.steps = self.report, self.steps + 1
        report = diagnose_overflow(self._params, self._scaler)
        if not before or before.scale != report.scale:
            self._same_since = self.steps
        start = (self.steps, report.scale)
        self._began = {row.name: self._began.get(row.name, start) for row in report}
        rows = (row._replace(since=self._began[row.name][0]) for row in report)
        self.report = OverflowReport(rows, report.scale)
        return self.report

    @property
    def verdict(self) -> str | None:
        """One sentence if the present overflows cannot end by themselves, otherwise None."""
        if not self.report:
            return None
        # Whoever is longest in trouble; of several, the one closest to the loss.
        name, (since, start) = min(reversed(self._began.items()), key=lambda item: item[1][0])
        scale, steps = self.report.scale, self.steps - since + 1
        stuck = self.steps - self._same_since + 1 >= self._floor_patience
        trouble = (
            f"the gradient of {name} has been inf or NaN in each of the {steps} steps since step "
            f"{since}"
        )
        if scale < start and (stuck or steps >= self._patience):
            floor = ", its floor" if stuck else ""
            return (
                f"No loss scale can cure this: {trouble}, while the scale fell from "
                f"{number(start)} to {number(scale)}{floor}, so look for the NaN or inf in "
                "the forward pass or the data."
            )
        if stuck and scale > 1:
            return (
                f"The loss scale is stuck at {number(scale)}: {trouble} and the scale has not "
                "moved; lower it, or make it dynamic."
            )
        if stuck:
            return (
                f"No loss scale can cure this: {trouble}, and the scale is {number(scale)} "
                "already, so look for the NaN or inf in the forward pass or the data."
            )
        return None
