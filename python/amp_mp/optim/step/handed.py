"""What a loss scaler passes to one step of an optimizer."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.optim.rule import Group
from amp_mp.optim.step.gather import Bucket
from amp_mp.optim.step.gradient_marks import GradientMarks


@dataclass
class Measured:
    """The gradients' statistics, device by device, read before the step that uses them.

    weights: of the masters, where the rule needs them and other processes hold a part.
    """

    buckets: list[Bucket]
    found: list[_C.Measurement]
    weights: list[_C.Measurement] | None = None

    def totals(self) -> dict[torch.device, Tensor]:
        """float64 [3] per device: sum of squares, largest finite |g|, number of inf and NaN."""
        pairs = zip(self.buckets, self.found, strict=True)
        return {bucket.device: each.rows[-1] for bucket, each in pairs}


@dataclass
class Handed:
    """What GradScaler, FP16_Optimizer or a stock torch scaler passes to a step."""

    # The loss scale that the gradients carry, a number or a tensor of one element; None is 1.
    scale: Tensor | float | None = None
    # Another's verdict, not 0 to skip the step; None where the step itself decides.
    found_inf: Tensor | float | None = None
    # Read the gradients for the verdict even if the optimizer itself needs no statistics.
    measure: bool = False
    # Statistics that were read already; the step then reads the gradients only once.
    measured: Measured | None = None
    # Clip to this norm instead of the optimizer's max_grad_norm.
    max_norm: float | None = None
    # Where the loss scale goes next. The step applies it where all parameters are on one device,
    # and then sets scale_updated.
    scale_update: _C.ScaleUpdate | None = None
    scale_updated: bool = False
    # The gradients that carry the scale, where it is handed before the step; see handed_to.
    marks: GradientMarks | None = None
    # Whether it is from a torch.amp.GradScaler, which does not know all processes.
    from_stock: bool = False
    # Whether a step has used them.
    used: bool = False


class TakesHanded(Protocol):
    """An optimizer that a loss scaler can hand something to."""

    handed: Handed | None
    param_groups: list[Group]


def carries_scale(optimizer: TakesHanded) -> bool:
    """Whether gradients of the optimizer carry the scale of `handed` since handle.scale_loss.

    Raises RuntimeError where they were written or replaced by hand before the step.
    """
    handed = optimizer.handed
    if handed is None or handed.marks is None:
        return False
    kept = handed.marks.kept()
    if handed.used and not kept:
        return False
    changed = handed.marks.changed(p for g in optimizer.param_groups for p in g["params"])
    if changed:
        raise RuntimeError(
            "gradients were written after handle.scale_loss, among them that of a parameter of "
            f"shape {tuple(changed[0].shape)}. float16 gradients of an amp_mp optimizer carry the "
            "loss scale until its step unscales them: clip with the optimizer's max_grad_norm, "
            "clear with its zero_grad, or make it with amp_scaling=False, and scale_loss unscales "
            "in place"
        )
    return bool(kept)


def handed_to(optimizer: TakesHanded) -> Handed:
    """What the step under way was handed; a stock torch.amp.GradScaler sets two attributes instead.

    Raises RuntimeError as carries_scale.
    """
    handed = optimizer.handed
    if handed is not None and (handed.marks is None or carries_scale(optimizer)):
        handed.used = True
        return handed
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    return Handed(scale, found_inf, from_stock=found_inf is not None)
