"""Gradients that carry the loss scale: kept apart from unscaled ones, checked, unscaled once."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amp_mp import _C
from amp_mp.scaling.observe import by_device, measure, observe


def gradients_of(params: Iterable[Tensor]) -> list[Tensor]:
    """The parameters' gradients; for a sparse one, which is coalesced in place, its values."""
    found = []
    for param in params:
        if param.grad is None:
            continue
        if param.grad.is_sparse:
            param.grad = param.grad.coalesce()
        found.append(param.grad.values() if param.grad.is_sparse else param.grad)
    return found


@contextmanager
def scaled_backward(params: Iterable[Tensor]) -> Iterator[None]:
    """Sets existing, unscaled gradients aside during the block and adds them back at its end.

    Inside the block backward makes scaled gradients only, so that none is unscaled twice. An
    exception in the block restores the earlier gradients.
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


@torch.no_grad()
def unscale_(grads: list[Tensor], scale: float) -> tuple[bool, float]:
    """Divides the gradients by the scale in place, after observing them (scaling/observe.py)."""
    seen = observe(measure(grads), scale)
    copy_all_(grads, grads, multiplier=1.0 / scale)
    return seen


def copy_all_(
    to: list[Tensor], from_: list[Tensor], multiplier: float = 1.0, saturate: bool = False
) -> None:
    """to[i] = from_[i] * multiplier, over several devices; saturate clamps float16 to +-65504."""
    for indices in by_device(to).values():
        _C.copy_(
            [to[i] for i in indices],
            [from_[i] for i in indices],
            multiplier=multiplier,
            saturate=saturate,
        )


def named_parameters(optimizers: Iterable[Optimizer]) -> list[tuple[str, Tensor]]:
    """Every parameter with its name, if the optimizer was given names, else with its position."""
    found = []
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            given = group.get("param_names")
            for position, param in enumerate(group["params"]):
                place = f"parameter {position} of group {index}"
                found.append((given[position] if given else place, param))
    return found
