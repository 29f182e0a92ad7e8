"""The table of gradients by tensor, and how numbers are written in tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from amp_mp.diagnose.histogram import Diagnosis, ExponentHistogram
from amp_mp.text_table import aligned


class Row(NamedTuple):
    """One tensor's gradients: "weight" or "activation", its name, what was seen, what it means."""

    kind: str
    name: str
    histogram: ExponentHistogram
    diagnosis: Diagnosis


class GradientReport(list[Row]):
    """A row for all weights, for all activations, and for each tensor; prints as a table.

    Histograms are of unscaled gradients, diagnoses of these gradients times `scale` in `dtype`.
    """

    def __init__(
        self,
        weights: Mapping[str, ExponentHistogram],
        activations: Mapping[str, ExponentHistogram],
        scale: float,
        dtype: torch.dtype,
        left_out: Mapping[str, str] | None = None,
    ) -> None:
        """Names and histograms; left_out: names of tensors not looked at, and why."""
        self.scale, self.dtype = scale, dtype
        self.left_out = dict(left_out or {})
        self.weights, self.activations = total(weights), total(activations)
        seen = (("weight", weights, self.weights), ("activation", activations, self.activations))
        super().__init__(
            Row(kind, name, histogram, histogram.at(scale, dtype))
            for kind, each, whole in seen
            if each
            for name, histogram in (("(all)", whole), *each.items())
        )

    @property
    def safe_log2_scale(self) -> int | None:
        """The largest power of two that no gradient seen overflows with; None without gradients."""
        return (self.weights + self.activations).largest_safe_log2_scale(self.dtype)

    def __str__(self) -> str:
        """A line for each row, then the largest safe scale."""
        if not self:
            return "no gradient has been seen"
        name = short(self.dtype)
        lines = [
            f"Gradients, and what becomes of them in {name} at loss scale {number(self.scale)}",
            "(shares of the elements that are not 0, inf or NaN; log2 of the unscaled largest)",
            aligned(_HEADER, map(_cells, self)),
            *(f"left out: {name}, {why}" for name, why in self.left_out.items()),
        ]
        safe = self.safe_log2_scale
        if safe is not None:
            everything = (self.weights + self.activations).at(2.0**safe, self.dtype)
            lines.append(
                f"The largest loss scale that overflows nothing seen is 2^{safe}: there "
                f"{share(everything.lost).strip()} would be lost and "
                f"{share(everything.subnormal).strip()} subnormal."
            )
        return "\n".join(lines)


def total(histograms: Mapping[str, ExponentHistogram]) -> ExponentHistogram:
    """All of them together."""
    return sum(histograms.values(), ExponentHistogram())


_HEADER = (
    *("gradient of", "tensor", "elements", " zero", " lost", " subnormal", " overflow"),
    *("inf", "NaN", "log2 largest", "headroom"),
)


def _cells(row: Row) -> tuple[str, ...]:
    seen, found = row.histogram, row.diagnosis
    elements = seen.elements
    return (
        row.kind,
        row.name,
        str(elements),
        share(seen.zeros / max(1, elements)),
        share(found.lost),
        share(found.subnormal),
        share(found.overflow),
        str(seen.infs or ""),
        str(seen.nans or ""),
        f"{math.log2(seen.amax):6.1f}" if seen.amax else "",
        "" if found.headroom is None else f"{found.headroom:+d} binades",
    )


def share(value: float) -> str:
    """A share in percent; what is not quite 0 or 1 does not look so."""
    if 0 < value < 0.0001:
        return "<0.01%"
    if 0.9999 < value < 1:
        return ">99.99%"
    return f"{value:6.2%}"


def number(value: float) -> str:
    """A scale: as a power of two where it is one."""
    fraction, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if fraction == 0.5 else f"{value:g}"


def short(dtype: torch.dtype) -> str:
    """A dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")
