"""The ledger of gradients: those that parameters had when a loss was scaled, and their versions.

Who scales losses notes the gradients that a loss has left, and asks here whether they were written,
replaced, set to None or to 0 since. The ledger keeps neither parameters nor gradients alive. What
scale they carry is told by what the next step is handed (Stepper.left).
"""

from collections.abc import Iterable, MutableMapping

from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from amp_mp.sharding.gradients import local_gradient
from amp_mp.sharding.reduction import WholeStatistics

# By parameter: its gradient when it was noted last, and the gradient's version then.
_noted: MutableMapping[Tensor, tuple[TensorWeakRef, int]] = WeakTensorKeyDictionary()


def note(params: Iterable[Tensor]) -> None:
    """Writes down the parameters' gradients as they are now."""
    for param in params:
        if param.grad is None:
            _noted.pop(param, None)
        else:
            _noted[param] = TensorWeakRef(param.grad), param.grad._version


def kept(params: Iterable[Tensor]) -> set[Tensor]:
    """The parameters whose gradients are the same tensors, unchanged."""
    found = set()
    for param in params:
        grad, noted = param.grad, _noted.get(param)
        if grad is None or noted is None:
            continue
        of_then, version = noted
        if of_then() is grad and grad._version == version:
            found.add(param)
    return found


def changed(params: Iterable[Tensor]) -> list[Tensor]:
    """Those of the parameters whose gradients were written or set since, and are not 0.

    Reads the gradients that were, and only those; waits for their device.
    """
    given = [param for param in params if param.grad is not None]
    same = kept(given)
    return nonzero([param for param in given if param not in same])


def are_gone(params: Iterable[Tensor]) -> bool:
    """Whether gradients were noted, and all of them have been set to None or to 0."""
    noted = [param for param in params if param in _noted]
    return bool(noted) and not kept(noted) and not changed(noted)


def nonzero(params: Iterable[Tensor]) -> list[Tensor]:
    """The parameters whose gradients have an element that is not 0, on any process."""
    given = [param for param in params if param.grad is not None]
    if not given:
        return []
    grads = [local_gradient(param, "a parameter") for param in given]
    values = [g.coalesce().values() if g is not None and g.is_sparse else g for g in grads]
    whole = WholeStatistics(given)
    rows = whole.of_whole(whole.measured(values)).tolist()
    return [param for param, row in zip(given, rows, strict=True) if row[1] or row[2]]
