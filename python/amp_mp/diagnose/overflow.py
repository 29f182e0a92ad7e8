"""Overflow reports on demand, and which overflows in a row no loss scale can end."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from amp_mp.diagnose.watch import scale_of
from amp_mp.overflow_report import OverflowReport, nonfinite_gradients
from amp_mp.scaling.overflows import SKIPS, STUCK, OverflowWatch
from amp_mp.text_table import scale_text

Named = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


def diagnose_overflow(params: Named, scale: Any = None) -> OverflowReport:
    """Which gradients have inf or NaN now; call it between backward and the step.

    Of a sparse gradient its values are read, of a DTensor this process's shard. Other tensor
    subclasses, and dtypes other than float32, float16 and bfloat16, are skipped.

    params: a module, or parameters by name: a mapping or pairs. scale: the loss scale of the
    gradients, for the advice: anything that `watch` takes; default: None, no scale. Raises
    TypeError for other params or scales, ValueError for a scale not finite or not above 0.
    """
    return nonfinite_gradients(_named(params), scale_of(scale))


def _named(params: Named) -> list[tuple[str, Tensor]]:
    if isinstance(params, nn.Module):
        return list(params.named_parameters())
    pairs = list(params.items() if isinstance(params, Mapping) else params)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)):
            expected = "expected a module or named parameters (model.named_parameters())"
            raise TypeError(f"{expected}, found {type(pair).__name__} among them")
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
        params, scaler: as diagnose_overflow's params and scale, with its errors.
        patience: a gradient is incurable if it is non-finite in this many steps in a row while the
            scale falls. Default: 25, because a scale of 2^24 may need 24 halvings until it fits.
        floor_patience: a scale is stuck if it stays the same in this many overflowing steps in a
            row; default: 5. Raises ValueError for a patience below 2.
    """

    def __init__(
        self, params: Named, scaler: Any = None, patience: int = SKIPS, floor_patience: int = STUCK
    ) -> None:
        if min(patience, floor_patience) < 2:
            raise ValueError(f"patience must be 2 or more, found {patience} and {floor_patience}")
        self._params, self._scaler = _named(params), scaler
        self._patience, self._floor_patience = patience, floor_patience
        # For each non-finite parameter the step at which that began, and the loss scale then.
        self._began: dict[str, tuple[int, float]] = {}
        self._watch = OverflowWatch()
        self.report = OverflowReport((), scale_of(scaler))

    @property
    def steps(self) -> int:
        """How many steps `update` has seen."""
        return self._watch.steps

    def update(self) -> OverflowReport:
        """The report of the next step, from 1; call it after backward, before the scale changes."""
        report = nonfinite_gradients(self._params, scale_of(self._scaler))
        self._watch.count(bool(report), report.scale)
        start = (self.steps, report.scale)
        self._began = {row.name: self._began.get(row.name, start) for row in report}
        rows = (row._replace(since=self._began[row.name][0]) for row in report)
        self.report = OverflowReport(rows, report.scale, of_shards=report.of_shards)
        return self.report

    @property
    def verdict(self) -> str | None:
        """One sentence if the present overflows cannot end by themselves, otherwise None."""
        if not self.report:
            return None
        # The parameter that has been non-finite longest; of several, the closest to the loss.
        name, (since, start) = min(reversed(self._began.items()), key=lambda item: item[1][0])
        scale, steps = self.report.scale, self.steps - since + 1
        stuck = self._watch.at_scale >= self._floor_patience
        fell, now = scale < start, scale_text(scale)
        if not stuck and not (fell and steps >= self._patience):
            return None
        trouble = f"the gradient of {name} has been inf or NaN in each of the {steps} steps since"
        if scale > 1 and not fell:
            cure = "and the scale has not moved; lower it, or make it dynamic."
            return f"The loss scale is stuck at {now}: {trouble} step {since} {cure}"
        history = f"and the scale is {now} already"
        if fell:
            floor = ", its floor" if stuck else ""
            history = f"while the scale fell from {scale_text(start)} to {now}{floor}"
        cure = "so look for the NaN or inf in the forward pass or the data."
        return f"No loss scale can cure this: {trouble} step {since}, {history}, {cure}"
