"""Functions for gradients that carry the loss scale, and for masters' gradients."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.scaling.observe import by_device, measure
from amp_mp.sharding.gradients import GradientStatistics, place_gradient
from amp_mp.sharding.shards import is_dtensor, local_of


def gradients_of(params: Iterable[Tensor]) -> list[Tensor]:
    """The memory of the parameters' gradients, without those that have none.

    Of a sparse one, which is coalesced in place, its values; of a DTensor this process's shard.
    """
    found = []
    for param in params:
        if param.grad is None:
            continue
        place_gradient(param)
        if param.grad.is_sparse:
            param.grad = param.grad.coalesce()
        found.append(param.grad.values() if param.grad.is_sparse else local_of(param.grad))
    return found


def measure_gradients(params: Sequence[Tensor]) -> dict[torch.device, Tensor]:
    """The statistics of the parameters' gradients; of DTensors over all processes.

    float64 [3] per device, as scaling.measure. Every process has to pass the same parameters.
    """
    if not any(is_dtensor(param) for param in params):
        return measure(gradients_of(params))
    total = GradientStatistics(params).total([next(iter(gradients_of([p])), None) for p in params])
    return {total.device: total}


@contextmanager
def set_aside(params: Iterable[Tensor]) -> Iterator[None]:
    """Sets existing, unscaled gradients aside during the block and adds them back at its end.

    Inside the block all gradients are scaled, so that none is unscaled twice. An exception in the
    block restores the earlier gradients.
    """
    aside = [(p, p.grad) for p in params]
    for param, _ in aside:
        param.grad = None
    try:
        yield
    except BaseException:
        for param, grad in aside:
            param.grad = grad
        raise
    for param, grad in aside:
        if grad is not None:
            param.grad = grad if param.grad is None else param.grad.add_(grad)


def make_gradient(param: Tensor, master: Tensor) -> None:
    """Gives the master a gradient of the parameter's kind, to be filled: dense, sparse or None."""
    grad = param.grad
    if grad is None:
        master.grad = None
    elif grad.is_sparse:
        values = torch.empty_like(grad.values(), dtype=torch.float32)
        master.grad = torch.sparse_coo_tensor(
            grad.indices(), values, grad.shape, is_coalesced=True, check_invariants=False
        )
    elif master.grad is None or master.grad.is_sparse:
        master.grad = torch.empty_like(master)


def copy_all_(
    pairs: Iterable[tuple[Tensor, Tensor]], multiplier: float = 1.0, saturate: bool = False
) -> None:
    """target = source * multiplier for all pairs; saturate clamps float16 to +-65504."""
    rows = [(local_of(target), local_of(source)) for target, source in pairs]
    for indices in by_device([target for target, _ in rows]).values():
        targets, sources = [rows[i][0] for i in indices], [rows[i][1] for i in indices]
        _C.copy_(targets, sources, multiplier=multiplier, saturate=saturate)
