"""The table of gradients by tensor."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from amp_mp.diagnose.histogram import Diagnosis, ExponentHistogram
from amp_mp.text_table import aligned, dtype_name, percent, scale_text


class Row(NamedTuple):
    """One tensor's gradients: "weight" or "activation", its name, their counts and diagnosis."""

    kind: str
    name: str
    histogram: ExponentHistogram
    diagnosis: Diagnosis


class GradientReport(list[Row]):
    """A row for all weights, for all activations, and for each tensor; prints as a table.

    weights, activations: ExponentHistograms of unscaled gradients, by name as arguments, added up
    as attributes. The diagnoses are of these gradients times `scale` in `dtype`. left_out: why
    tensors were not counted, by name.
    """

    def __init__(
        self,
        weights: Mapping[str, ExponentHistogram],
        activations: Mapping[str, ExponentHistogram],
        scale: float,
        dtype: torch.dtype,
        left_out: Mapping[str, str] | None = None,
    ) -> None:
        self.scale, self.dtype = scale, dtype
        self.left_out = dict(left_out or {})
        self.weights = sum(weights.values(), ExponentHistogram())
        self.activations = sum(activations.values(), ExponentHistogram())
        seen = (("weight", weights, self.weights), ("activation", activations, self.activations))
        super().__init__(
            Row(kind, name, histogram, histogram.at(scale, dtype))
            for kind, each, total in seen
            if each
            for name, histogram in (("(all)", total), *each.items())
        )

    @property
    def safe_log2_scale(self) -> int | None:
        """The largest power of two that no gradient seen overflows with; None without gradients."""
        return (self.weights + self.activations).largest_safe_log2_scale(self.dtype)

    def __str__(self) -> str:
        if not self:
            return "no gradient has been seen"
        name, scale = dtype_name(self.dtype), scale_text(self.scale)
        lines = [
            f"Gradients, and what becomes of them in {name} at loss scale {scale}",
            "(shares of the elements that are not 0, inf or NaN; log2 of the unscaled largest)",
            aligned(_HEADER, map(_cells, self)),
            *(f"left out: {name}, {why}" for name, why in self.left_out.items()),
        ]
        if (safe := self.safe_log2_scale) is not None:
            there = (self.weights + self.activations).at(2.0**safe, self.dtype)
            lines.append(
                f"The largest loss scale that overflows nothing seen is 2^{safe}: there "
                f"{percent(there.lost)} would be lost and {percent(there.subnormal)} subnormal."
            )
        return "\n".join(lines)


_HEADER = (
    *("gradient of", "tensor", "elements", " zero", " lost", " subnormal", " overflow"),
    *("inf", "NaN", "log2 largest", "headroom"),
)


def _cells(row: Row) -> tuple[object, ...]:
    kind, name, seen, found = row
    shares = (seen.zeros / max(1, seen.elements), found.lost, found.subnormal, found.overflow)
    counts = (seen.elements, *(f"{percent(share):>6}" for share in shares), seen.infs or None)
    largest = f"{math.log2(seen.amax):6.1f}" if seen.amax else None
    headroom = None if found.headroom is None else f"{found.headroom:+d} binades"
    return (kind, name, *counts, seen.nans or None, largest, headroom)
