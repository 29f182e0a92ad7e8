"""Scaled gradients: made beside those that are already true, checked and unscaled once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from amp_mp import _C


def gradients_of(params: Iterable[Tensor]) -> list[Tensor]:
    """The gradients there are."""
    return [p.grad for p in params if p.grad is not None]


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


def has_overflow(grads: list[Tensor]) -> bool:
    """Whether any element is inf or NaN."""
    rows = [_C.measure([grads[i] for i in indices])[-1, 2] for indices in by_device(grads)]
    return any(bool(row > 0) for row in rows)


@torch.no_grad()
def unscale_(grads: list[Tensor], scale: float) -> bool:
    """Divides the gradients by the scale in place; returns whether one was inf or NaN before."""
    found = has_overflow(grads)
    for indices in by_device(grads):
        own = [grads[i] for i in indices]
        _C.copy_(own, own, multiplier=1.0 / scale)
    return found


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
