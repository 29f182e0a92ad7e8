"""Pictures of gradients and updates. They need matplotlib, but no display."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from amp_mp.diagnose.histogram import EXPONENTS, ExponentHistogram, limits
from amp_mp.diagnose.report import GradientReport, number, share, short
from amp_mp.diagnose.updates import UpdateTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOST, SUBNORMAL, NORMAL, OVERFLOW = "#d62728", "#ff9f1c", "#2a9d4a", "#7b2cbf"


def plot_gradients(report: GradientReport) -> Figure:
    """Weight and activation gradients over their binades, and what the format makes of them.

    Bars: share of the elements that are not 0, inf or NaN in each binade of the unscaled gradients.
    Shaded: what the report's loss scale makes of a binade in the report's format. Dotted: the
    format's edges without scaling, from which the loss scale moves them by log2 of it.

    Raises ValueError if the report is empty, ImportError without matplotlib.
    """
    seen = [
        (f"{kind} gradients", histogram)
        for kind, histogram in (("Weight", report.weights), ("Activation", report.activations))
        if histogram.elements
    ]
    if not seen:
        raise ValueError("the report is empty: no gradient has been seen, so none can be drawn")
    figure, panels = new_figure(len(seen), height=5.2)
    for axes, (title, histogram) in zip(panels, seen, strict=True):
        _draw_histogram(axes, title, histogram, report.scale, report.dtype)
    panels[0].set_ylabel("share of the elements per binade [%]\n(0, inf and NaN left out)")
    _legend(figure, panels[:1])
    return figure


def _draw_histogram(
    axes: Axes, title: str, histogram: ExponentHistogram, scale: float, dtype: torch.dtype
) -> None:
    counts = histogram.counts
    shares = (100 * counts / max(1, int(counts.sum()))).tolist()
    axes.bar(EXPONENTS, shares, width=1, align="edge", color="#27408b", linewidth=0, zorder=3)

    edges, shift = limits(dtype), math.log2(scale)
    plain = [math.log2(edge) for edge in (edges.lost, edges.normal, edges.overflow)]
    lost, normal, overflow = (edge - shift for edge in plain)
    seen = [e for e, share in zip(EXPONENTS, shares, strict=True) if share]
    left = min([lost, plain[0], *seen]) - 4
    right = max([overflow, plain[2], *seen]) + 4
    zones = (
        (left, lost, LOST, "lost: becomes 0"),
        (lost, normal, SUBNORMAL, "subnormal: loses precision"),
        (normal, overflow, NORMAL, "normal"),
        (overflow, right, OVERFLOW, "overflow: becomes inf"),
    )
    for start, end, color, label in zones:
        axes.axvspan(start, end, color=color, alpha=0.18, linewidth=0, label=label)
    top = 1.25 * max([*shares, 1])
    if shift:
        for edge in plain:
            name = f"edges of {short(dtype)} without scaling" if edge == plain[0] else None
            axes.axvline(edge, color="0.35", linestyle=":", linewidth=1, label=name)
        arrow = {"arrowstyle": "->", "color": "0.2"}
        ends = ((normal, 0.9 * top), (plain[1], 0.9 * top))
        axes.annotate("", *ends, arrowprops=arrow, zorder=4)
        axes.text(
            *((normal + plain[1]) / 2, 0.92 * top, f"loss scale {number(scale)}"),
            ha="center",
            fontsize=8,
        )
    found = histogram.at(scale, dtype)
    line = ", ".join(
        f"{share(value).strip()} {what}"
        for what, value in (
            ("lost", found.lost),
            ("subnormal", found.subnormal),
            ("overflow", found.overflow),
        )
    )
    axes.set_title(f"{title} in {short(dtype)} at loss scale {number(scale)}\n{line}", fontsize=10)
    axes.set_xlabel("magnitude of the unscaled gradient [log2 |g|]")
    axes.set_xlim(left, right)
    axes.set_ylim(0, top)


def plot_updates(table: UpdateTable) -> Figure:
    """What becomes of each parameter's updates, and each layer's median ratio to the weight.

    Left: shares lost, in between and kept. Right: median |update| / |weight| of the parameter's
    layer at the last step, with the two edges of the formats in use.

    Raises ValueError if the table is empty, ImportError without matplotlib.
    """
    if not table:
        raise ValueError("the table is empty: no step has been seen, so none can be drawn")
    figure, (left, right) = new_figure(2, height=2.0 + 0.24 * len(table), sharey=True)
    rows = range(len(table))
    start = [0.0] * len(table)
    for part, color, label in (
        ([100 * row.lost for row in table], LOST, "lost"),
        ([100 * row.between for row in table], SUBNORMAL, "depends on the weight"),
        ([100 * row.kept for row in table], NORMAL, "kept"),
    ):
        left.barh(rows, part, left=start, color=color, alpha=0.75, label=label)
        start = [a + b for a, b in zip(start, part, strict=True)]
    names = [f"{row.name} ({short(row.dtype)})" for row in table]
    left.set_yticks(rows, names, fontsize=8)
    left.invert_yaxis()
    left.set_xlim(0, 100)
    left.set_title("Updates of weights kept without float32 masters", fontsize=10)
    left.set_xlabel("share of the updates [%]")

    points = [(row.median, i) for i, row in enumerate(table) if row.median]
    if points:
        right.plot(*zip(*points, strict=True), "o", color="#27408b")
    for dtype in sorted({row.dtype for row in table}, key=str):
        exponent = round(math.log2(torch.finfo(dtype).eps))
        for edge, style in ((exponent - 1, "-"), (exponent - 2, "--")):
            label = f"2^{edge}: {short(dtype)} {'keeps above' if style == '-' else 'loses below'}"
            color = "#d62728" if dtype == torch.float16 else "#7b2cbf"
            right.axvline(2.0**edge, color=color, linestyle=style, linewidth=1, label=label)
    right.set_xscale("log", base=2)
    right.set_title("Median ratio of the parameter's layer, last step", fontsize=10)
    right.set_xlabel("|update| / |weight|")
    _legend(figure, (left, right))
    return figure


def save(figure: Figure, path: str | Path) -> None:
    """Writes a picture; the file's ending chooses the format. Makes folders that are missing."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """One for the panels together, below them, where it hides nothing."""
    found = [axes.get_legend_handles_labels() for axes in panels]
    handles = [handle for each, _ in found for handle in each]
    labels = [label for _, each in found for label in each]
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)


def new_figure(panels: int, height: float, sharey: bool = False) -> tuple[Figure, Sequence[Axes]]:
    """An empty figure that needs no display, with panels side by side."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib, which is not installed: pip install matplotlib"
        ) from error
    figure = Figure(figsize=(1 + 6 * panels, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, sharey=sharey, squeeze=False)[0]
    for each in axes:
        each.grid(alpha=0.3)
    return figure, list(axes)
