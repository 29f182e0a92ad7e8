"""Logs of gradients, loss scale and updates for TensorBoard."""

from typing import Any

import torch

from amp_mp.diagnose.gradient_watch import Watch, scale_of
from amp_mp.diagnose.plot import plot_gradients
from amp_mp.diagnose.updates import UpdateRatios


def log(
    writer: Any,
    step: int,
    watch: Watch | None = None,
    policy: Any = None,
    ratios: UpdateRatios | None = None,
    *,
    figures: bool = False,
) -> None:
    """Writes what is given to a SummaryWriter; call it between backward and zero_grad.

    Scalars: `loss_scale`; `gradients/weights/...` and `gradients/activations/...`: lost, subnormal
    and overflow as shares and headroom in binades, of all that the watch has counted since its last
    reset; `updates/lost/NAME` as shares and `updates/median/LAYER` as ratios. Histograms:
    `gradients/NAME`, the unscaled gradients of the parameters now, inf and NaN replaced by 0.

    Args:
        writer: anything with SummaryWriter's add_scalar, add_histogram and add_figure.
        step: the position on the horizontal axis.
        policy: what holds the loss scale, anything `watch` takes; default: the watch's scaler.
        figures: also `gradients/exponents`, the picture, which takes a fraction of a second.
    """
    policy = watch.scaler if policy is None and watch is not None else policy
    scalars: dict[str, float | None] = {}
    if policy is not None:
        scalars["loss_scale"] = scale_of(policy)
    if watch is not None:
        report = watch.report(scale_of(policy))
        for kind, _, _, found in (row for row in report if row.name == "(all)"):
            for key in ("lost", "subnormal", "overflow", "headroom"):
                scalars[f"gradients/{kind}s/{key}"] = getattr(found, key)
        for name, grad in watch.gradients():
            writer.add_histogram(f"gradients/{name}", torch.where(grad.isfinite(), grad, 0.0), step)
        if figures and report:
            writer.add_figure("gradients/exponents", plot_gradients(report), step)
    if ratios is not None:
        scalars |= {f"updates/lost/{row.name}": row.lost for row in ratios.report()}
        scalars |= {f"updates/median/{layer}": m for layer, m in ratios.medians.items()}
    for name, value in scalars.items():
        if value is not None:
            writer.add_scalar(name, value, step)
