"""Pictures of gradients and updates, which need matplotlib but no display.

A table tells how much a format loses, a picture where a loss scale would move it: the command
line's `--out` and TensorBoard logs show these.
"""

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from amp_mp.diagnose.gradient_watch import GradientReport
from amp_mp.diagnose.histogram import EXPONENTS, ExponentHistogram, limits
from amp_mp.diagnose.updates import UpdateTable
from amp_mp.text_table import dtype_name, percent, scale_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOST, SUBNORMAL, NORMAL, OVERFLOW = "#d62728", "#ff9f1c", "#2a9d4a", "#7b2cbf"
BELOW: dict[str, Any] = {"loc": "outside lower center", "ncols": 5, "fontsize": 8}  # legends


def plot_gradients(report: GradientReport) -> "Figure":
    """Weight and activation gradients over their binades, and what the format makes of them.

    Bars: share of the elements that are not 0, inf or NaN in each binade of the unscaled gradients.
    Shaded: what becomes of a binade in the report's format at its loss scale. Dotted: the format's
    edges without scaling. ValueError if the report is empty, ImportError without matplotlib.
    """
    kinds = (("Weight gradients", report.weights), ("Activation gradients", report.activations))
    seen = [(title, histogram) for title, histogram in kinds if histogram.elements]
    if not seen:
        raise ValueError("the report is empty: no gradient has been seen, so none can be drawn")
    figure, panels = new_figure(len(seen), height=5.2)
    for axes, (title, histogram) in zip(panels, seen, strict=True):
        _draw(axes, title, histogram, report)
    panels[0].set_ylabel("share of the elements per binade [%]\n(0, inf and NaN left out)")
    figure.legend(*panels[0].get_legend_handles_labels(), **BELOW)  # the panels' are the same
    return figure


def _draw(axes: "Axes", title: str, histogram: ExponentHistogram, report: GradientReport) -> None:
    scale, dtype = report.scale, report.dtype
    name, at_scale = dtype_name(dtype), f"loss scale {scale_text(scale)}"
    counts = histogram.counts
    shares = (100 * counts / max(1, int(counts.sum()))).tolist()
    axes.bar(EXPONENTS, shares, width=1, align="edge", color="#27408b", linewidth=0, zorder=3)

    edges = limits(dtype)
    shift = math.log2(scale)
    plain = [math.log2(edge) for edge in (edges.lost, edges.normal, edges.overflow)]
    scaled = [edge - shift for edge in plain]
    drawn = [*plain, *scaled, *(e for e, share in zip(EXPONENTS, shares, strict=True) if share)]
    ends = [min(drawn) - 4, *scaled, max(drawn) + 4]
    labels = "lost: becomes 0", "subnormal: loses precision", "normal", "overflow: becomes inf"
    colors = LOST, SUBNORMAL, NORMAL, OVERFLOW
    for zone, label, color in zip(pairwise(ends), labels, colors, strict=True):
        axes.axvspan(*zone, color=color, alpha=0.18, linewidth=0, label=label)
    top = 1.25 * max([*shares, 1])
    if shift:
        text = f"edges of {name} without scaling"
        axes.vlines(plain, 0, top, colors="0.35", linestyles=":", linewidth=1, label=text)
        tip, tail = (scaled[1], 0.9 * top), (plain[1], 0.9 * top)
        axes.annotate("", tip, tail, arrowprops={"arrowstyle": "->", "color": "0.2"}, zorder=4)
        axes.text((scaled[1] + plain[1]) / 2, 0.92 * top, at_scale, ha="center", fontsize=8)
    found = histogram.at(scale, dtype)._asdict()
    line = ", ".join(f"{percent(found[key])} {key}" for key in ("lost", "subnormal", "overflow"))
    axes.set_title(f"{title} in {name} at {at_scale}\n{line}", fontsize=10)
    axes.set_xlabel("magnitude of the unscaled gradient [log2 |g|]")
    axes.set(xlim=(ends[0], ends[-1]), ylim=(0, top))


def plot_updates(table: UpdateTable) -> "Figure":
    """What becomes of each parameter's updates, and each layer's median ratio to the weight.

    Left: shares lost, in between and kept. Right: median |update| / |weight| of the layer at the
    last step, with both edges of the formats. ValueError if the table is empty, ImportError without
    matplotlib.
    """
    if not table:
        raise ValueError("the table is empty: no step has been seen, so none can be drawn")
    figure, (left, right) = new_figure(2, height=2.0 + 0.24 * len(table), sharey=True)
    rows = range(len(table))
    start = [0.0] * len(table)
    parts = (("lost", LOST, "lost"), ("between", SUBNORMAL, "depends on the weight"))
    for key, color, label in (*parts, ("kept", NORMAL, "kept")):
        part = [100 * getattr(row, key) for row in table]
        left.barh(rows, part, left=start, color=color, alpha=0.75, label=label)
        start = [a + b for a, b in zip(start, part, strict=True)]
    left.set_yticks(rows, [f"{row.name} ({dtype_name(row.dtype)})" for row in table], fontsize=8)
    left.invert_yaxis()
    left.set(xlim=(0, 100), xlabel="share of the updates [%]")
    left.set_title("Updates of weights kept without float32 masters", fontsize=10)

    points = [(row.median, i) for i, row in enumerate(table) if row.median]
    if points:
        right.plot(*zip(*points, strict=True), "o", color="#27408b")
    for dtype in sorted({row.dtype for row in table}, key=str):
        half = torch.finfo(dtype).eps / 2
        color = LOST if dtype == torch.float16 else OVERFLOW
        for edge, style, what in ((half, "-", "keeps above"), (half / 2, "--", "loses below")):
            label = f"{scale_text(edge)}: {dtype_name(dtype)} {what}"
            right.axvline(edge, color=color, linestyle=style, linewidth=1, label=label)
    right.set_xscale("log", base=2)
    right.set_title("Median ratio of the parameter's layer, last step", fontsize=10)
    right.set_xlabel("|update| / |weight|")
    figure.legend(**BELOW)
    return figure


def new_figure(panels: int, height: float, sharey: bool = False) -> "tuple[Figure, list[Axes]]":
    """An empty figure that needs no display, with panels side by side; height in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        needed = "pictures need matplotlib, which is not installed: pip install matplotlib"
        raise ImportError(needed) from error
    figure = Figure(figsize=(1 + 6 * panels, height), dpi=120, layout="constrained")
    axes = list(figure.subplots(1, panels, sharey=sharey, squeeze=False)[0])
    for each in axes:
        each.grid(alpha=0.3)
    return figure, axes
