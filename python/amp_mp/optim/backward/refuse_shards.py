"""What gradient release cannot do with parameters that are split over processes."""

import warnings
from typing import Any

from amp_mp.optim.step.protocols import Steppable
from amp_mp.optim.step.step_report import StepReport


def refuse_shards(optimizer: Steppable, scaler: Any, clip: str) -> None:
    """Raises ValueError where a shard's step would depend on gradients of other processes.

    A step in a gradient's hook knows this process's shard alone. It would clip by a part of the
    norm, and skip where another process does not.
    """
    wrong = ""
    if scaler is not None:
        wrong = "scaler= checks each gradient for overflow"
    elif getattr(optimizer, "check_overflow", False):
        wrong = "check_overflow=True checks each gradient"
    elif any(rule.needs_norms for rule in optimizer.group_rules()):
        wrong = f"{type(optimizer).__name__} needs the norms of whole tensors"
    elif any(rule.directions is not None for rule in optimizer.group_rules()):
        wrong = f"{type(optimizer).__name__} needs whole matrices"
    elif optimizer.max_grad_norm is not None and clip == "parameter":
        wrong = 'clip="parameter" clips by the norm of a whole tensor'
    if wrong:
        raise ValueError(
            f"release=True: {wrong}, and a hook sees only this process's shard of a DTensor; take "
            'clip="previous" to clip by the last step\'s norm, leave it out, or attach without '
            "release"
        )


def warn_of_nonfinite(report: StepReport | None) -> None:
    """Warns where gradients of the reported step were inf or NaN: the shards were stepped before.

    report: of the last step that has reached the host, or None.
    """
    if report is not None and report.skipped:
        warnings.warn(
            f"amp_mp: gradients were inf or NaN in step {report.number}, and release=True has "
            "stepped shards with them: a hook cannot know what other processes find. Load the last "
            "checkpoint, and train without release where this may happen",
            stacklevel=5,
        )
