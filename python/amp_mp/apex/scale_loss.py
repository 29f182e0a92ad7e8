"""The block in which a scaled loss goes backward, and optimizers with loss scales of their own."""

import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amp_mp.apex.fold import hand, has_float16, may_fold, unscale
from amp_mp.apex.fp16_optimizer import FP16_Optimizer
from amp_mp.apex.gradients import measure_gradients, set_aside
from amp_mp.apex.iteration import (
    all_parameters,
    begin,
    give_up,
    skip_next_step,
    update_scale_once,
)
from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.step.gradient_marks import GradientMarks
from amp_mp.scaling.observe import observe
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
        iteration = begin(policy)
        scale, params = policy.scale, all_parameters(optimizers)
        folding = [each for each in optimizers if may_fold(each, optimizers)]
        with set_aside(params), _warning_if_unscaled(loss):
            yield loss.float() * scale
            found_inf, max_abs = observe(measure_gradients(params), scale)
            folding = [each for each in folding if has_float16(each)]
            unscale(params, folding, scale)
        for each in folding:
            hand(each, scale)
        iteration.marks.append(GradientMarks(params))
        is_first = update_scale_once(policy, iteration, found_inf, max_abs, optimizers)
    if not found_inf:
        return
    if is_first:
        message = "Gradient overflow, skipping update, reducing loss scale from %g to %g"
        logger.warning(message, scale, policy.scale)
    for each in optimizers:
        skip_next_step(each)
        iteration.skipped.add(each)


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
        if isinstance(optimizer, FP16_Optimizer):
            raise TypeError("optimizer: an FP16_Optimizer scales itself; call its backward(loss)")
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, found {type(optimizer).__name__}"
            )
        self.optimizer = optimizer
        self.loss_scalers = [copy.deepcopy(policy) for _ in range(num_loss)]
        self._device = device
        self._next = 0
        self._marks = GradientMarks(())  # after the last loss

    def scale_loss(self, loss: Tensor) -> AbstractContextManager[Tensor]:
        """As AmpHandle.scale_loss; RuntimeError for more than num_loss losses between two steps."""
        if self._marks.are_gone():  # the last losses were given up without a step
            self._next = 0
            for policy in self.loss_scalers:
                give_up(policy)
        if self._next == len(self.loss_scalers):
            raise RuntimeError(
                f"scale_loss was called more than num_loss={self._next} times before a step; "
                f"wrap_optimizer(optimizer, num_loss={self._next + 1}) gives each loss a scale"
            )
        self._next += 1
        return self._block(loss, self.loss_scalers[self._next - 1])

    @contextmanager
    def _block(self, loss: Tensor, policy: ScalePolicy) -> Iterator[Tensor]:
        with scaled_loss(loss, self.optimizer, policy, self._device) as scaled:
            yield scaled
        self._marks = GradientMarks(all_parameters([self.optimizer]))

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
