"""Pictures of training and validation losses."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average, corrected for its start; as long as ``values``."""
    result: list[float] = []
    total = weights = 0.0
    for value in values:
        total = weight * total + value
        weights = weight * weights + 1.0
        result.append(total / weights)
    return result


def figure(panels: int, sharey: bool = True) -> tuple[Figure, list[Axes]]:
    """An empty figure with ``panels`` axes side by side; it needs no display."""
    result = Figure(figsize=(1 + 6 * panels, 4.8), dpi=120, layout="constrained")
    FigureCanvasAgg(result)
    axes = result.subplots(1, panels, sharey=sharey, squeeze=False)[0]
    for each in axes:
        each.grid(alpha=0.3)
    return result, list(axes)


def draw_curve(
    axes: Axes,
    train_loss: Sequence[float],
    validation: Sequence[tuple[int, float]],
    label: str,
    color: str,
    style: str = "-",
    marker: str = "o",
    x: Sequence[float] | None = None,
) -> None:
    """Draw a run: training losses (faint), smoothed training losses, and validation points.

    ``x`` has each step's position on the horizontal axis; by default the step's number, from 1.
    """
    x = range(1, len(train_loss) + 1) if x is None else x
    axes.plot(x, train_loss, color=color, alpha=0.2, linewidth=0.8)
    axes.plot(x, smooth(train_loss), style, color=color, label=f"{label}, training (smoothed)")
    points = [x[step - 1] for step, _ in validation]
    losses = [loss for _, loss in validation]
    look = {"color": color, "markerfacecolor": "none", "markersize": 8, "markeredgewidth": 1.5}
    axes.plot(points, losses, marker, label=f"{label}, validation", zorder=3, **look)
