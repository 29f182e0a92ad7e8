"""Marks of the gradients that a loss scale is for, which is handed to their optimizer's step."""

from collections.abc import Iterable

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


def carries_scale(handed: _C.StepInputs | None, groups: list[Group]) -> bool:
    """Whether gradients in the param_groups carry the scale of `handed` since handle.scale_loss.

    Raises RuntimeError where they were written or replaced by hand before the step.
    """
    if handed is None or handed.marks is None:
        return False
    marks: GradientMarks = handed.marks
    kept = marks.kept()
    if handed.used and not kept:
        return False
    changed = marks.changed(p for group in groups for p in group["params"])
    if changed:
        raise RuntimeError(
            "gradients were written after handle.scale_loss, among them that of a parameter of "
            f"shape {tuple(changed[0].shape)}. float16 gradients of an amp_mp optimizer carry the "
            "loss scale until its step unscales them: clip with the optimizer's max_grad_norm, "
            "clear with its zero_grad, or make it with amp_scaling=False, and scale_loss unscales "
            "in place"
        )
    return bool(kept)
