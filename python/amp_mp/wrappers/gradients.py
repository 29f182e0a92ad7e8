"""Functions for gradients that carry the loss scale, and for masters' gradients."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import isinf
from typing import Any

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.sharding.gradients import GradientStatistics, by_device, measure, writable_gradient
from amp_mp.sharding.reduction import Reduction
from amp_mp.sharding.shards import is_dtensor, local_of


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """The tensors that the optimizer updates: masters in an FP16_Optimizer, else the parameters."""
    for group in optimizer.param_groups:
        yield from group["params"]


def gradients_of(params: Iterable[Tensor]) -> list[Tensor]:
    """As gradient_of_each, without those that are None."""
    return [grad for grad in gradient_of_each(params) if grad is not None]


def gradient_of_each(params: Iterable[Tensor]) -> list[Tensor | None]:
    """The memory of each parameter's gradient, or None.

    Of a sparse one, which is coalesced in place, its values; of a DTensor this process's shard.
    """
    found = []
    for param in params:
        grad = writable_gradient(param)
        if grad is not None and grad.is_sparse:
            param.grad = grad.coalesce()
            grad = param.grad.values()
        found.append(grad)
    return found


def totals_of(params: Sequence[Tensor]) -> dict[torch.device, Tensor]:
    """As `measure`; of DTensors over all processes, which have to pass the same parameters."""
    if not any(is_dtensor(param) for param in params):
        return measure(gradients_of(params))
    return GradientStatistics(params).totals(gradient_of_each(params))


def multiply_gradients(params: Iterable[Tensor], multiplier: float) -> None:
    """Multiplies the gradients in place."""
    grads = gradients_of(params) if multiplier != 1.0 else []
    copy_all_(zip(grads, grads, strict=True), multiplier=multiplier)


def clip_gradients(
    params: Sequence[Tensor], max_norm: float, norm_type: float, process_groups: Sequence[Any] = ()
) -> float:
    """torch.nn.utils.clip_grad_norm_; returns the norm as a number.

    Of DTensors, and with process_groups, all processes get the norm of the whole gradients and have
    to pass the same parameters; ValueError for a norm_type that is not above 0 there.
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
    for grad in grads if not coefficient >= 1.0 else ():
        if grad is not None:
            grad.mul_(coefficient)
    return norm


@contextmanager
def set_aside(params: Iterable[Tensor]) -> Iterator[None]:
    """Sets unscaled gradients aside during the block and adds them back at its end.

    Inside the block all gradients are scaled. After an exception the earlier ones are back.
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
