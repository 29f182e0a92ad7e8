"""Functions for gradients that carry the loss scale, and for masters' gradients."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import isinf
from typing import Any

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.scaling.observe import by_device, measure
from amp_mp.sharding.gradients import GradientStatistics, place_gradient
from amp_mp.sharding.reduction import Reduction
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


def gradient_of_each(params: Iterable[Tensor]) -> list[Tensor | None]:
    """As gradients_of, with None for each parameter that has no gradient."""
    return [next(iter(gradients_of([param])), None) for param in params]


def measure_gradients(params: Sequence[Tensor]) -> dict[torch.device, Tensor]:
    """The statistics of the parameters' gradients; of DTensors over all processes.

    float64 [3] per device, as scaling.measure. Every process has to pass the same parameters.
    """
    if not any(is_dtensor(param) for param in params):
        return measure(gradients_of(params))
    total = GradientStatistics(params).total(gradient_of_each(params))
    return {total.device: total}


def clip_gradients(
    params: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    process_groups: Sequence[Any] = (),
) -> float:
    """torch.nn.utils.clip_grad_norm_; returns the norm as a number.

    Of DTensors, and with process_groups, all processes get the norm of the whole gradients, for
    which every process has to pass the same parameters. ValueError for a norm_type that is not
    above 0 there.
    """
    if not process_groups and not any(is_dtensor(param) for param in params):
        return float(nn.utils.clip_grad_norm_(params, max_norm, norm_type))
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0 for sharded gradients, found {norm_type}")
    grads = gradient_of_each(params)
    device = local_of(params[0]).device
    rows = torch.zeros(len(grads), 3, dtype=torch.float64, device=device)
    for row, grad in zip(rows, grads, strict=True):
        if grad is not None and grad.numel():
            absolute = grad.abs()
            row[0] = 0.0 if isinf(norm_type) else absolute.double().pow(norm_type).sum()
            row[1] = absolute.max()
    total = Reduction(params, process_groups, device).total(rows)
    norm = float(total[1]) if isinf(norm_type) else float(total[0]) ** (1.0 / norm_type)
    coefficient = max_norm / (norm + 1e-6)
    if not coefficient >= 1.0:
        for grad in grads:
            if grad is not None:
                grad.mul_(coefficient)
    return norm


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
            _C.used_on_current_stream([local_of(grad)])
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
