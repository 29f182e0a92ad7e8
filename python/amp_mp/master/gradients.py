"""Scaled gradients: made beside those that are already true, checked and unscaled once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from amp_mp import _C


def gradients_of(params: Iterable[Tensor]) -> list[Tensor]:
    """The gradients there are; of a sparse one, which is coalesced in place, the values."""
    found = []
    for param in params:
        if param.grad is None:
            continue
        if param.grad.is_sparse:
            param.grad = param.grad.coalesce()
        found.append(param.grad._values() if param.grad.is_sparse else param.grad)
    return found


def by_device(tensors: list[Tensor]) -> list[list[int]]:
    """Indices of the tensors, a list for each device: native passes take one device at a time."""
    indices: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        indices.setdefault(tensor.device, []).append(i)
    return list(indices.values())


@contextmanager
def scaled_backward(params: Iterable[Tensor]) -> Iterator[None]:
    """Sets aside the gradients there are, true ones, and adds them to what the block leaves.

    Inside, backward makes scaled gradients alone, so that unscaling them touches nothing twice.
    An exception in the block leaves the gradients that there were.
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


def observe(grads: list[Tensor], scale: float) -> tuple[bool, float]:
    """Whether an element is inf or NaN, and the largest finite |g| / scale: one native read."""
    totals = [_C.measure([grads[i] for i in indices])[-1] for indices in by_device(grads)]
    found = any(bool(total[2] > 0) for total in totals)
    return found, max((float(total[1]) for total in totals), default=0.0) / scale


@torch.no_grad()
def unscale_(grads: list[Tensor], scale: float) -> tuple[bool, float]:
    """Divides the gradients by the scale in place; returns what observe saw before."""
    seen = observe(grads, scale)
    for indices in by_device(grads):
        own = [grads[i] for i in indices]
        _C.copy_(own, own, multiplier=1.0 / scale)
    return seen


def copy_all_(
    to: list[Tensor], from_: list[Tensor], multiplier: float = 1.0, saturate: bool = False
) -> None:
    """to[i] = from_[i] * multiplier, over several devices; saturate clamps float16 to +-65504."""
    for indices in by_device(to):
        _C.copy_(
            [to[i] for i in indices],
            [from_[i] for i in indices],
            multiplier=multiplier,
            saturate=saturate,
        )
