"""Gradients since loss scaling has noted them: which a script has changed, and which are left.

csrc/torch/weights/gradients.h has the notes: the loss scale that each carries, and a stamp.
"""

from collections.abc import Iterable

from torch import Tensor

from amp_mp import _C
from amp_mp.sharding.gradients import Statistics, local_gradient
from amp_mp.sharding.reduction import WholeStatistics


def changed(params: Iterable[Tensor]) -> list[Tensor]:
    """Those of the parameters whose gradients were written or set since, and are not 0.

    Reads the gradients that were, and only those; waits for their device.
    """
    given = list(params)
    same = _C.unwritten_gradients(given)
    return nonzero([param for param in given if param not in same])


def zeros(params: Iterable[Tensor]) -> set[Tensor]:
    """The parameters whose gradients are 0 now. Reads the gradients; waits for their device."""
    given = [param for param in params if param.grad is not None]
    return set(given).difference(nonzero(given))


def present(params: Iterable[Tensor], zeros: set[Tensor]) -> set[Tensor]:
    """The parameters that have their noted gradients still, and not as zeros of a script.

    zeros: those whose gradients were 0 when they were noted. Of an optimizer's parameters all have
    to be given: `grad.data.zero_()` advances no version counter, so such a 0 is a script's where
    another gradient has become 0 in this way. Reads the gradients; waits for their device.
    """
    given = list(params)
    same, noted = _C.unwritten_gradients(given), _C.gradient_scales(given)
    # DistributedDataParallel may have moved a gradient into another bucket.
    moved = {p for p in given if p.grad is not None and p.grad._base is not None}
    found = set(nonzero([p for p in given if p in noted or p in moved]))
    return found | same if same - found <= zeros else found


def nonzero(params: Iterable[Tensor]) -> list[Tensor]:
    """The parameters whose gradients have an element that is not 0, on any process."""
    given = [param for param in params if param.grad is not None]
    if not given:
        return []
    grads = [local_gradient(param, "a parameter") for param in given]
    values = [g.coalesce().values() if g is not None and g.is_sparse else g for g in grads]
    whole = WholeStatistics([{"params": given}])
    rows = whole.of_whole(whole.measured(values)).tolist()
    found = zip(given, (Statistics(*row) for row in rows), strict=True)
    return [param for param, row in found if row.max_abs or row.non_finite]
