"""What a loss scaler passes to one step of an optimizer."""

from dataclasses import dataclass

from torch import Tensor

from amp_mp import _C
from amp_mp.optim.rule import Group
from amp_mp.optim.step.gradient_marks import GradientMarks


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
    measured: _C.Measured | None = None
    # Clip to this norm instead of the optimizer's max_grad_norm.
    max_norm: float | None = None
    # Where the loss scale goes next. The step applies it where all parameters are on one device,
    # and then sets scale_updated.
    scale_update: _C.ScaleUpdate | None = None
    scale_updated: bool = False
    # The gradients that carry the scale, where it is handed before the step.
    marks: GradientMarks | None = None
    # Whether it is from a torch.amp.GradScaler, which does not know all processes.
    from_stock: bool = False
    # Whether a step has used them.
    used: bool = False


def carries_scale(handed: Handed | None, groups: list[Group]) -> bool:
    """Whether gradients in the param_groups carry the scale of `handed` since handle.scale_loss.

    Raises RuntimeError where they were written or replaced by hand before the step.
    """
    if handed is None or handed.marks is None:
        return False
    kept = handed.marks.kept()
    if handed.used and not kept:
        return False
    changed = handed.marks.changed(p for group in groups for p in group["params"])
    if changed:
        raise RuntimeError(
            "gradients were written after handle.scale_loss, among them that of a parameter of "
            f"shape {tuple(changed[0].shape)}. float16 gradients of an amp_mp optimizer carry the "
            "loss scale until its step unscales them: clip with the optimizer's max_grad_norm, "
            "clear with its zero_grad, or make it with amp_scaling=False, and scale_loss unscales "
            "in place"
        )
    return bool(kept)
