"""The block in which a scaled loss goes backward, and the skipped step after an overflow."""

import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amp_mp.apex.fp16_optimizer import FP16_Optimizer
from amp_mp.apex.gradients import gradients_of, named_parameters, scaled_backward, unscale_
from amp_mp.casting.step_hooks import steps_taken
from amp_mp.optim.base import FusedOptimizer
from amp_mp.scaling.nonfinite import nonfinite_gradients
from amp_mp.scaling.observe import OverflowCounter, update_scale
from amp_mp.scaling.policies import ScalePolicy, Static

logger = logging.getLogger("amp_mp")


@contextmanager
def scaled_loss(
    loss: Tensor, optimizer: Optimizer | Sequence[Optimizer], policy: ScalePolicy, device_type: str
) -> Iterator[Tensor]:
    """Yields loss times scale, casts off; on exit unscales, moves the scale, maybe skips a step.

    See AmpHandle.scale_loss.
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
        is_first = _observe(policy, found_inf, max_abs, optimizers)
    if found_inf:
        if is_first:
            logger.warning(
                "Gradient overflow, skipping update, reducing loss scale from %g to %g",
                before,
                policy.scale,
            )
        for each in optimizers:
            skip_next_step(each)


def _observe(
    policy: ScalePolicy, found_inf: bool, max_abs: float, optimizers: list[Optimizer]
) -> bool:
    """Moves the scale once per iteration: several losses before a step count as one.

    The first loss moves it at once, so that the scale has fallen when the block ends. A later loss
    goes back to the scale at the iteration's start and counts all losses together. Returns whether
    this is the iteration's first overflow.
    """
    overflows = _overflows.get(policy, OverflowCounter())
    last = _iterations.get(policy)
    is_first = found_inf
    if last is not None and last.steps == steps_taken():
        is_first = found_inf and not last.found_inf
        found_inf, max_abs = found_inf or last.found_inf, max(max_abs, last.max_abs)
        policy.load_state_dict(last.policy)
        overflows = last.overflows
    _iterations[policy] = _Iteration(
        steps_taken(), policy.state_dict(), copy.copy(overflows), found_inf, max_abs
    )
    _overflows[policy] = overflows

    def describe(scale: float) -> str:
        return str(nonfinite_gradients(named_parameters(optimizers), scale))

    update_scale(policy, overflows, found_inf, max_abs, describe)
    return is_first


class _Iteration(NamedTuple):
    """What a policy observed since the last step of any optimizer, and its state before."""

    steps: int
    policy: dict[str, Any]
    overflows: OverflowCounter
    found_inf: bool
    max_abs: float


_iterations: WeakKeyDictionary[ScalePolicy, _Iteration] = WeakKeyDictionary()
_overflows: WeakKeyDictionary[ScalePolicy, OverflowCounter] = WeakKeyDictionary()


@contextmanager
def _warning_if_unscaled(loss: Tensor) -> Iterator[None]:
    """Inside, loss.backward() warns that scaled_loss.backward() is needed, and then runs."""
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

    `step` itself is not replaced, so schedulers and wrappers see an ordinary step.
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
