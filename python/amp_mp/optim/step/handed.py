"""What a loss scaler passes to one step of an optimizer, and marks of the gradients it is for."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from amp_mp import _C
from amp_mp.optim.rule import Group
from amp_mp.sharding.gradients import GradientStatistics, local_gradient


class GradientMarks:
    """The gradients of parameters at one moment; keeps neither parameters nor gradients alive."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._marks = [
            (TensorWeakRef(p), TensorWeakRef(p.grad), p.grad._version)
            for p in params
            if p.grad is not None
        ]

    def kept(self) -> list[Tensor]:
        """The parameters whose gradients are the same tensors, unchanged."""
        found = []
        for param_ref, grad_ref, version in self._marks:
            param = param_ref()
            grad = None if param is None else param.grad
            if param is not None and grad is not None and grad is grad_ref():
                found += [param] if grad._version == version else []
        return found

    def changed(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Those of the parameters whose gradients were written or set since, and are not 0.

        Reads the gradients that were, and only those; waits for their device.
        """
        kept = {id(param) for param in self.kept()}
        return nonzero(p for p in params if p.grad is not None and id(p) not in kept)

    def are_gone(self) -> bool:
        """Whether there were gradients, and all of them have been set to None or to 0."""
        if not self._marks or self.kept():
            return False
        params = [ref() for ref, _, _ in self._marks]
        return not self.changed(p for p in params if p is not None)


def nonzero(params: Iterable[Tensor]) -> list[Tensor]:
    """The parameters whose gradients have an element that is not 0, on any process."""
    given = [param for param in params if param.grad is not None]
    grads = [local_gradient(param, "a parameter") for param in given]
    values = [g.coalesce().values() if g is not None and g.is_sparse else g for g in grads]
    rows = GradientStatistics(given).of_tensors(values).tolist() if given else []
    return [param for param, row in zip(given, rows, strict=True) if row[1] or row[2]]


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
    # Whether gradients carry the scale after the step, too, as those of FP16_Optimizer.
    keeps: bool = False
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
