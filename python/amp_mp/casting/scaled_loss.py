"""The block in which a scaled loss goes backward, and the skipped step after an overflow."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amp_mp.casting.steps import steps_taken
from amp_mp.master.fp16_optimizer import FP16_Optimizer
from amp_mp.master.gradients import gradients_of, scaled_backward, unscale_
from amp_mp.master.streak import OverflowStreak, names_of
from amp_mp.optim.base import FusedOptimizer
from amp_mp.scaling.policies import Policy, Static

logger = logging.getLogger("amp_mp")


@contextmanager
def scaled_loss(
    loss: Tensor, optimizer: Optimizer | Sequence[Optimizer], policy: Policy, device_type: str
) -> Iterator[Tensor]:
    """Yields loss times scale, casts off; on exit unscales, moves the scale, maybe skips a step.

    What it promises is said at AmpHandle.scale_loss.
    """
    optimizers = _checked(optimizer)
    with torch.autocast(device_type, enabled=False):
        if isinstance(policy, Static) and policy.scale == 1:
            yield loss
            return
        params = _parameters(optimizers)
        with scaled_backward(params), _warning_if_unscaled(loss):
            yield loss.float() * policy.scale
            found_inf, max_abs = unscale_(gradients_of(params), policy.scale)
        before = policy.scale
        named = names_of(optimizers) if found_inf else []
        is_news = _observe(policy, found_inf, max_abs, named)
    if found_inf:
        if is_news:
            logger.warning(
                "Gradient overflow, skipping update, reducing loss scale from %g to %g",
                before,
                policy.scale,
            )
        for each in optimizers:
            skip_next_step(each)


def _observe(
    policy: Policy, found_inf: bool, max_abs: float, named: list[tuple[str, Tensor]]
) -> bool:
    """Moves the scale, once an iteration: several losses before a step are one observation.

    The first one moves it at once, so that it has fallen when the block ends; a later one goes back
    to where the iteration began and counts them all together. named: the parameters with this
    loss's gradients. Returns whether this is the iteration's first overflow.
    """
    streak = _streaks.setdefault(policy, OverflowStreak())
    last = _iterations.get(policy)
    is_news = found_inf
    if last is not None and last.steps == steps_taken():
        is_news = found_inf and not last.found_inf
        found_inf, max_abs = found_inf or last.found_inf, max(max_abs, last.max_abs)
        policy.load_state_dict(last.policy)
        vars(streak).update(last.streak)
    before = policy.state_dict()
    _iterations[policy] = _Iteration(steps_taken(), before, dict(vars(streak)), found_inf, max_abs)
    policy.update(found_inf, max_abs)
    streak.observe(found_inf, before["scale"], policy.scale, named)
    return is_news


class _Iteration(NamedTuple):
    """What a policy has seen since the last step of any optimizer, and how it was before."""

    steps: int
    policy: dict[str, Any]
    streak: dict[str, Any]
    found_inf: bool
    max_abs: float


_iterations: WeakKeyDictionary[Policy, _Iteration] = WeakKeyDictionary()
_streaks: WeakKeyDictionary[Policy, OverflowStreak] = WeakKeyDictionary()


@contextmanager
def _warning_if_unscaled(loss: Tensor) -> Iterator[None]:
    """Inside, loss.backward() says that the scaled loss was meant, and does it all the same."""
    true: Callable[..., None] = loss.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        warnings.warn(
            "amp_mp: backward() was called on the unscaled loss inside a scale_loss block, which "
            "will divide its gradients by the scale; call scaled_loss.backward() instead",
            stacklevel=2,
        )
        true(*args, **kwargs)

    loss.backward = backward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del loss.backward


def _checked(optimizer: Any) -> list[Optimizer]:
    optimizers = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    for each in optimizers:
        if isinstance(each, FP16_Optimizer):
            raise TypeError("scale_loss: an FP16_Optimizer scales itself; call its backward(loss)")
        if not isinstance(each, Optimizer):
            raise TypeError(
                "scale_loss: optimizer must be a torch.optim.Optimizer or several of them, "
                f"found {type(each).__name__}"
            )
        if isinstance(each, FusedOptimizer) and each.releases:
            raise ValueError(
                "scale_loss: an optimizer attached with release=True steps during backward, with "
                "gradients that are still scaled; attach it with scaler=amp_mp.GradScaler()"
            )
    return optimizers


def _parameters(optimizers: list[Optimizer]) -> list[Tensor]:
    """Each once, also where optimizers share it."""
    groups = [group for each in optimizers for group in each.param_groups]
    return list({id(p): p for group in groups for p in group["params"]}.values())


def skip_next_step(optimizer: Optimizer) -> None:
    """Makes one step do nothing: gradients are set aside before it and put back after it.

    step itself is never replaced, so schedulers and wrappers see a step like any other.
    """
    if getattr(optimizer, "_amp_mp_skips", False):
        return  # two overflows before a step are one skip
    optimizer._amp_mp_skips = True  # type: ignore[attr-defined]
    aside: list[tuple[Tensor, Tensor]] = []

    def before(*_: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    aside.append((param, param.grad))
                    param.grad = None

    def after(*_: Any) -> None:
        for handle in handles:
            handle.remove()
        optimizer._amp_mp_skips = False  # type: ignore[attr-defined]
        for param, grad in aside:
            param.grad = grad

    handles = [
        optimizer.register_step_pre_hook(before),
        optimizer.register_step_post_hook(after),
    ]
