"""The block in which a scaled loss goes backward, and the skipped step after an overflow."""

import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amp_mp.apex.fp16_optimizer import FP16_Optimizer
from amp_mp.apex.fp16_utils import master_params
from amp_mp.apex.gradients import copy_all_, gradients_of, set_aside
from amp_mp.casting.autocast import steps_taken
from amp_mp.optim.base import FusedOptimizer
from amp_mp.scaling.observe import (
    OverflowCounter,
    describe_nonfinite,
    measure,
    observe,
    update_scale,
)
from amp_mp.scaling.policies import ScalePolicy, Static

logger = logging.getLogger("amp_mp")


@contextmanager
def scaled_loss(
    loss: Tensor, optimizer: Optimizer | Sequence[Optimizer], policy: ScalePolicy, device_type: str
) -> Iterator[Tensor]:
    """The block of AmpHandle.scale_loss, with a loss scale and the device type of the casts."""
    optimizers = _checked(optimizer)
    with torch.autocast(device_type, enabled=False):
        if isinstance(policy, Static) and policy.scale == 1:
            yield loss
            return
        scale, params = policy.scale, _all_parameters(optimizers)
        with set_aside(params), _warning_if_unscaled(loss):
            yield loss.float() * scale
            grads = gradients_of(params)
            found_inf, max_abs = observe(measure(grads), scale)
            with torch.no_grad():
                copy_all_(zip(grads, grads, strict=True), multiplier=1.0 / scale)
        is_first = _update_scale(policy, found_inf, max_abs, optimizers)
    if not found_inf:
        return
    if is_first:
        message = "Gradient overflow, skipping update, reducing loss scale from %g to %g"
        logger.warning(message, scale, policy.scale)
    for each in optimizers:
        skip_next_step(each)


class _Iteration(NamedTuple):
    """What a policy was told since the last step of any optimizer, and its state before that."""

    steps: int
    policy_before: dict[str, Any]
    counter_before: OverflowCounter
    counter: OverflowCounter
    found_inf: bool
    max_abs: float


_iterations: WeakKeyDictionary[ScalePolicy, _Iteration] = WeakKeyDictionary()


def _update_scale(
    policy: ScalePolicy, found_inf: bool, max_abs: float, optimizers: list[Optimizer]
) -> bool:
    """Moves the scale once per iteration: several losses before a step count as one.

    The first loss moves it at once, so that the scale has fallen when the block ends. A later loss
    goes back to the scale at the iteration's start and counts all losses together. Returns whether
    this is the iteration's first overflow.
    """
    last = _iterations.get(policy)
    counter = OverflowCounter() if last is None else last.counter
    is_first = found_inf
    if last is not None and last.steps == steps_taken():
        is_first = found_inf and not last.found_inf
        found_inf, max_abs = found_inf or last.found_inf, max(max_abs, last.max_abs)
        policy.load_state_dict(last.policy_before)
        counter = last.counter_before
    _iterations[policy] = _Iteration(
        steps_taken(), policy.state_dict(), copy.copy(counter), counter, found_inf, max_abs
    )
    describe = partial(describe_nonfinite, [each.param_groups for each in optimizers])
    update_scale(policy, counter, found_inf, max_abs, describe)
    return is_first


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


def _all_parameters(optimizers: list[Optimizer]) -> list[Tensor]:
    """Each once, also where optimizers share it."""
    return list(dict.fromkeys(param for each in optimizers for param in master_params(each)))


def skip_next_step(optimizer: Optimizer) -> None:
    """Hides the gradients from the next step, which does nothing but still counts as a step."""
    if getattr(optimizer, "_amp_mp_skips", False):
        return  # two overflows before a step are one skip
    optimizer._amp_mp_skips = True  # type: ignore[attr-defined]
    aside: list[tuple[Tensor, Tensor]] = []

    def before(*_: Any) -> None:
        for param in _all_parameters([optimizer]):
            if param.grad is not None:
                aside.append((param, param.grad))
                param.grad = None

    def after(*_: Any) -> None:
        for hook in hooks:
            hook.remove()
        optimizer._amp_mp_skips = False  # type: ignore[attr-defined]
        for param, grad in aside:
            param.grad = grad

    hooks = (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after))


class OptimWrapper:
    """An optimizer and one loss scale for each of its losses.

        optimizer = handle.wrap_optimizer(optimizer, num_loss=2)
        with optimizer.scale_loss(loss_a) as scaled:
            scaled.backward()
        with optimizer.scale_loss(loss_b) as scaled:
            scaled.backward()
        optimizer.step()

    Losses are told apart by their order since the last step. Each one's gradients are unscaled by
    its own scale, exactly once, and add up; if any overflows, the step changes nothing. Everything
    else is that of `optimizer`, to which schedulers should be attached.
    """

    def __init__(
        self, optimizer: Optimizer, policy: ScalePolicy, num_loss: int, device: str
    ) -> None:
        if isinstance(num_loss, bool) or not isinstance(num_loss, int) or num_loss < 1:
            raise ValueError(f"num_loss must be a whole number above 0, found {num_loss!r}")
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, found {type(optimizer).__name__}"
            )
        self.optimizer = optimizer
        self.loss_scalers = [copy.deepcopy(policy) for _ in range(num_loss)]
        self._device = device
        self._next = 0

    def scale_loss(self, loss: Tensor) -> AbstractContextManager[Tensor]:
        """As AmpHandle.scale_loss; RuntimeError for more than num_loss losses between two steps."""
        if self._next == len(self.loss_scalers):
            raise RuntimeError(
                f"scale_loss was called more than num_loss={self._next} times before a step; "
                f"wrap_optimizer(optimizer, num_loss={self._next + 1}) gives each loss a scale"
            )
        self._next += 1
        return scaled_loss(loss, self.optimizer, self.loss_scalers[self._next - 1], self._device)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's step, which changes nothing if a loss has overflowed; without closure."""
        if closure is not None:  # its losses cannot be scaled from here
            raise NotImplementedError(
                "a wrapped optimizer takes no closure; use amp.FP16_Optimizer, which does"
            )
        self._next = 0
        return self.optimizer.step()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet: being copied or unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"OptimWrapper({self.optimizer!r}, loss_scalers={self.loss_scalers!r})"
