"""Loss scale, gradients and updates for TensorBoard."""

from typing import Any

import torch

from amp_mp.diagnose.plot import plot_gradients
from amp_mp.diagnose.updates import UpdateRatios
from amp_mp.diagnose.watch import Watch, scale_of


def writer(log_dir: str) -> Any:
    """A torch.utils.tensorboard.SummaryWriter; the ImportError without it says what to install."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "logging needs tensorboard, which is not installed: pip install tensorboard"
        ) from error
    return SummaryWriter(log_dir)


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
        writer: anything with the methods add_scalar, add_histogram and add_figure of SummaryWriter.
        step: the position on the horizontal axis.
        watch: the Watch of the model.
        policy: what holds the loss scale, anything `watch` takes; default: the watch's scaler.
        ratios: UpdateRatios of the optimizer.
        figures: also `gradients/exponents`, the picture, which takes a fraction of a second.
    """
    if policy is None and watch is not None:
        policy = watch.scaler
    if policy is not None:
        writer.add_scalar("loss_scale", scale_of(policy), step)
    if watch is not None:
        report = watch.report(scale_of(policy))
        for row in report:
            if row.name == "(all)":
                for name in ("lost", "subnormal", "overflow", "headroom"):
                    if (value := getattr(row.diagnosis, name)) is not None:
                        writer.add_scalar(f"gradients/{row.kind}s/{name}", value, step)
        for name, grad in watch.gradients():
            writer.add_histogram(f"gradients/{name}", torch.where(grad.isfinite(), grad, 0.0), step)
        if figures and report:
            writer.add_figure("gradients/exponents", plot_gradients(report), step)
    if ratios is not None:
        for each in ratios.report():
            writer.add_scalar(f"updates/lost/{each.name}", each.lost, step)
        for layer, median in ratios.medians.items():
            writer.add_scalar(f"updates/median/{layer}", median, step)
