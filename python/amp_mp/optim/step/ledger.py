"""The ledger of gradients: those of the losses since the last step, each with a stamp.

Loss scaling records gradients here, and asks whether a script has written, replaced or cleared them
since. The ledger keeps no gradient alive, and no reference to a parameter.
"""

from collections.abc import Iterable, MutableMapping

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from amp_mp import _C
from amp_mp.sharding.gradients import Statistics, local_gradient
from amp_mp.sharding.reduction import WholeStatistics

_stamps: MutableMapping[Tensor, _C.Stamp] = WeakTensorKeyDictionary()


def note(params: Iterable[Tensor]) -> bool:
    """Writes down the parameters' gradients as they are now; returns whether there are any."""
    grads = [param.grad for param in params if param.grad is not None]
    _stamps.update({grad: _C.Stamp(grad) for grad in grads})
    return bool(grads)


def kept(params: Iterable[Tensor]) -> set[Tensor]:
    """The parameters whose gradients are noted ones, unchanged."""
    given = [(param, param.grad) for param in params if param.grad is not None]
    return {param for param, grad in given if (s := _stamps.get(grad)) and s.still(grad)}


def changed(params: Iterable[Tensor]) -> list[Tensor]:
    """Those of the parameters whose gradients were written or set since, and are not 0.

    Reads the gradients that were, and only those; waits for their device.
    """
    given = list(params)
    same = kept(given)
    return nonzero([param for param in given if param not in same])


def are_gone(params: Iterable[Tensor]) -> bool:
    """Whether all noted gradients of the parameters have been set to None or to 0."""
    given = list(params)
    return not kept(given) and not changed(given)


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
