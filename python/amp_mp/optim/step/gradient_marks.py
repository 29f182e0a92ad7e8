"""Tells later whether parameters still have the gradients that they have now."""

from collections.abc import Iterable

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from amp_mp.sharding.gradients import GradientStatistics, local_gradient, measure
from amp_mp.sharding.shards import is_dtensor


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
    split = [param for param in given if is_dtensor(param)]
    found = []
    if split:
        locals_ = [local_gradient(param, "a parameter") for param in split]
        rows = GradientStatistics(split).of_tensors(locals_)
        found += [p for p, row in zip(split, rows.tolist(), strict=True) if row[1] or row[2]]
    for param in given:
        grad = param.grad
        if grad is not None and not is_dtensor(param):
            values = grad.coalesce().values() if grad.is_sparse else grad
            bad = any(total[1] > 0 or total[2] > 0 for total in measure([values]).values())
            found += [param] if bad else []
    return found
