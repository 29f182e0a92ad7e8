"""The ledger of gradients: what loss scale each carries, and whether a script has written it.

Loss scaling records every gradient that a loss has left, with a stamp. A gradient that is not here
comes from a plain backward pass or from the script. The ledger keeps no gradient alive, and no
reference to a parameter.
"""

from collections.abc import Iterable, MutableMapping
from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from amp_mp import _C
from amp_mp.sharding.gradients import Statistics, local_gradient
from amp_mp.sharding.reduction import WholeStatistics


class Entry(NamedTuple):
    """What is known of one gradient."""

    stamp: _C.Stamp  # of the tensor when it was recorded
    scale: float | None  # by which it is still to be divided; None if that was done


_entries: MutableMapping[Tensor, Entry] = WeakTensorKeyDictionary()


def note(params: Iterable[Tensor], scale: float | None = None) -> bool:
    """Records the parameters' gradients as they are now; returns whether there are any.

    scale: by which they are still to be divided.
    """
    grads = [param.grad for param in params if param.grad is not None]
    _entries.update({grad: Entry(_C.Stamp(grad), scale) for grad in grads})
    return bool(grads)


def known(params: Iterable[Tensor]) -> dict[Tensor, float | None]:
    """The parameters whose gradients are recorded, also if a script has written them since.

    With the scale by which each is still to be divided.
    """
    given = [(p, _entries.get(p.grad)) for p in params if p.grad is not None]
    return {param: entry.scale for param, entry in given if entry is not None}


def kept(params: Iterable[Tensor]) -> set[Tensor]:
    """The parameters whose gradients are recorded ones, unchanged."""
    given = [(p, p.grad, _entries.get(p.grad)) for p in params if p.grad is not None]
    return {p for p, grad, entry in given if entry and entry.stamp.still(grad)}


def changed(params: Iterable[Tensor]) -> list[Tensor]:
    """Those of the parameters whose gradients were written or set since, and are not 0.

    Reads the gradients that were, and only those; waits for their device.
    """
    given = list(params)
    same = kept(given)
    return nonzero([param for param in given if param not in same])


def present(params: Iterable[Tensor]) -> set[Tensor]:
    """The parameters that have their recorded gradients still, and not as zeros.

    Reads those that were written since, and only those; waits for their device.
    """
    given = list(params)
    same, recorded = kept(given), known(given)
    # DistributedDataParallel may have moved a gradient into another bucket.
    moved = [p for p in given if p.grad is not None and p.grad._base is not None]
    written = [param for param in {**recorded, **dict.fromkeys(moved)} if param not in same]
    return same | set(nonzero(written)) if written else same


def are_gone(params: Iterable[Tensor]) -> bool:
    """Whether no parameter has a gradient other than 0."""
    given = list(params)
    return not kept(given) and not changed(given)


def forget(params: Iterable[Tensor]) -> None:
    """Strikes the parameters' gradients, which were cleared."""
    for param in params:
        if param.grad is not None:
            _entries.pop(param.grad, None)


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
