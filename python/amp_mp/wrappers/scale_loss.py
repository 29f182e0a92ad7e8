"""handle.scale_loss: the block in which a scaled loss goes backward, and OptimWrapper."""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from amp_mp.casting.step_hooks import steps_taken
from amp_mp.messages import warn
from amp_mp.optim.base import FusedOptimizer, stepper_of
from amp_mp.optim.step.overflow_report import describe_nonfinite
from amp_mp.param_groups import params_in
from amp_mp.scaling.overflows import OverflowWatch
from amp_mp.scaling.policies import ScalePolicy, Static
from amp_mp.sharding import gradients
from amp_mp.sharding.reduction import on_any_process, totals_of
from amp_mp.wrappers.carriers import (
    Carrier,
    InMasters,
    carrier_for,
    collect,
    model_groups,
    refuse_release,
)
from amp_mp.wrappers.fp16_optimizer import FP16_Optimizer
from amp_mp.wrappers.loss_block import Block, are_gone, scaled_backward
from amp_mp.wrappers.masters import model_params
from amp_mp.wrappers.wrapper import LOSS_SCALE

logger = logging.getLogger("amp_mp")


@dataclass
class Iteration:
    """The losses since the last step of any optimizer, and what was before them."""

    policy_before: dict[str, Any]
    watch_before: OverflowWatch
    steps: int = field(default_factory=steps_taken)  # of all optimizers
    losses: int = 0
    overflow: bool = False
    max_abs: float = 0.0  # the largest true |g|
    # The losses', in their order, which is the same on every process.
    optimizers: WeakKeyDictionary[Optimizer, None] = field(default_factory=WeakKeyDictionary)
    skipped: list[Optimizer] = field(default_factory=list)  # whose next step does nothing

    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped since the first loss."""
        return self.steps != steps_taken()

    def is_gone(self) -> bool:
        """Whether no gradient is left without a step: dropped, or applied by hand."""
        params = dict.fromkeys(chain(*map(model_params, self.optimizers)))
        groups = [*chain(*[each.param_groups for each in self.optimizers])]
        return self.losses > 0 and are_gone(params, groups)


class SkippedSteps:
    """Optimizers whose next step is to do nothing, but still counts as a step."""

    def __init__(self) -> None:
        self._hooks: dict[Optimizer, list[RemovableHandle]] = {}

    def add(self, optimizer: Optimizer) -> None:
        """Hides the gradients from the optimizer's next step."""
        if optimizer in self._hooks:
            return  # two overflows before a step are one skip
        aside: list[tuple[Tensor, Tensor]] = []
        handles: list[RemovableHandle] = []

        def before(*_: Any) -> None:
            if self._hooks.get(optimizer) is not handles:
                return  # an interrupt came before the handle of this hook was kept
            for param in all_parameters([optimizer]):
                if param.grad is not None:
                    aside.append((param, param.grad))
                    param.grad = None
            if aside and isinstance(optimizer, FusedOptimizer):
                stepper_of(optimizer).replaced.note_gradient()

        def after(*_: Any) -> None:
            self.remove(optimizer)
            for param, grad in aside:
                param.grad = grad

        pre, post = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        self._hooks[optimizer] = handles
        handles.append(pre(before))
        handles.append(post(after))

    def remove(self, optimizer: Optimizer) -> None:
        """Takes back what `add` did."""
        for hook in self._hooks.pop(optimizer, ()):
            hook.remove()


class ScaledLosses:
    """A loss scale, and the losses that it scales, iteration by iteration."""

    loss_scale: Any = LOSS_SCALE
    _loss_scale: Any = LOSS_SCALE  # Apex's other name

    def __init__(self, policy: ScalePolicy, device_type: str, skips: SkippedSteps) -> None:
        self.loss_scaler = policy
        self._device_type = device_type
        self._skips = skips
        self._watch = OverflowWatch()
        self._iteration: Iteration | None = None

    @contextmanager
    def block(
        self,
        loss: Tensor,
        optimizer: Optimizer | Iterable[Optimizer],
        carrier_of: Callable[[Optimizer], Carrier] = carrier_for,
        delays: bool = False,
    ) -> Iterator[Tensor]:
        """The block of AmpHandle.scale_loss.

        carrier_of: gives the carrier of an optimizer. delays: leaves the gradients scaled, for the
        next loss to add to.
        """
        optimizers, policy = _checked(optimizer), self.loss_scaler
        carriers = [carrier_of(each) for each in optimizers]
        checks = not (isinstance(policy, Static) and policy.scale == 1)
        if checks:
            gradients.refuse_capture([torch.device(self._device_type)])
        else:  # gradients are true at once; masters still get theirs
            carriers = [each for each in carriers if isinstance(each, InMasters)]
        with torch.autocast(self._device_type, enabled=False):
            iteration = self._begin() if checks and not delays else None
            scale, found = policy.scale, (False, 0.0)
            scaled = loss.float() * scale if checks else loss
            of_others = loss if "backward" in vars(loss) else None
            with ExitStack() as stack:
                block = stack.enter_context(
                    scaled_backward(carriers, scale, delays, scaled, of_others)
                )
                if checks:
                    stack.enter_context(_warning_if_unscaled(loss, block))
                yield scaled
                block.prepare()
                if iteration is not None:
                    groups = model_groups(carriers)
                    found = gradients.overflow_in(totals_of(groups), scale)
                if not delays:
                    collect(carriers, scale)
            if iteration is not None:
                iteration.optimizers.update({each.optimizer: None for each in carriers})
                self._end(iteration, optimizers, scale, *found)

    def _end(
        self,
        iteration: Iteration,
        optimizers: list[Optimizer],
        scale: float,
        overflow: bool,
        max_abs: float,
    ) -> None:
        """Moves the scale, once per iteration; an overflow skips the optimizers' next step.

        A later loss goes back to the scale at the iteration's start and counts all together.
        """
        is_first = overflow and not iteration.overflow
        iteration.overflow |= overflow
        iteration.max_abs = max(iteration.max_abs, max_abs)
        if iteration.losses > 0:
            self.loss_scaler.load_state_dict(iteration.policy_before)
            self._watch = copy.copy(iteration.watch_before)
        iteration.losses += 1
        describe = partial(describe_nonfinite, [each.param_groups for each in optimizers])
        self._watch.update(self.loss_scaler, iteration.overflow, iteration.max_abs, describe)
        if is_first:
            self.report_overflow(scale)
        for each in optimizers if overflow else ():
            iteration.skipped.append(each)  # first: after an interrupt give_up has to find it
            self._skips.add(each)

    def report_overflow(self, before: float) -> None:
        """Says that a step will be skipped; before: the scale of the loss that overflowed."""
        message = "Gradient overflow, skipping update, reducing loss scale from %g to %g"
        logger.warning(message, before, self.loss_scaler.scale)

    def _begin(self) -> Iteration:
        """The iteration to which a loss belongs: a new one where the last one is over."""
        last = self._iteration
        if last is not None and not last.has_stepped():
            if not last.is_gone():
                return last
            self.give_up()
        self._iteration = Iteration(self.loss_scaler.state_dict(), copy.copy(self._watch))
        return self._iteration

    def give_up(self) -> None:
        """Ends an iteration whose gradients were cleared: what it would have skipped is gone."""
        if self._iteration is not None and not self._iteration.has_stepped():
            for each in self._iteration.skipped:
                self._skips.remove(each)
        self._iteration = None


def all_parameters(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Each once, also where optimizers share it."""
    groups = chain(*[each.param_groups for each in optimizers])
    return list(dict.fromkeys(params_in(groups)))


def _checked(optimizer: Any) -> list[Optimizer]:
    optimizers = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    for each in optimizers:
        if isinstance(each, FP16_Optimizer):
            raise TypeError("scale_loss: an FP16_Optimizer scales itself; call its backward(loss)")
        if not isinstance(each, Optimizer):
            expected = "scale_loss: optimizer must be a torch.optim.Optimizer or several of them"
            raise TypeError(f"{expected}, found {type(each).__name__}")
        refuse_release(each, "scale_loss")
    return optimizers


@contextmanager
def _warning_if_unscaled(loss: Tensor, block: Block) -> Iterator[None]:
    """Inside, loss.backward() warns that scaled_loss.backward() is needed, and then runs."""
    true: Callable[..., None] = loss.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        warn(
            "backward() was called on the unscaled loss inside a scale_loss block, which "
            "will divide its gradients by the scale; call scaled_loss.backward() instead"
        )
        block.prepare()
        true(*args, **kwargs)

    outer = vars(loss).get("backward")  # of a block around this one, for the same loss
    loss.backward = backward  # type: ignore[method-assign]
    try:
        yield
    finally:
        if outer is None:
            del loss.backward
        else:
            loss.backward = outer  # type: ignore[method-assign]


class OptimWrapper:
    """An optimizer and one loss scale for each of its losses.

        optimizer = handle.wrap_optimizer(optimizer, num_loss=2)
        for loss in loss_a, loss_b:
            with optimizer.scale_loss(loss) as scaled:
                scaled.backward()
        optimizer.step()

    Losses are told apart by their order since the last step. Each one's gradients are unscaled by
    its own scale and add up; if any overflows, the step changes nothing. Everything else is that of
    `optimizer`, to which schedulers should be attached.
    """

    def __init__(
        self, optimizer: Optimizer, policy: ScalePolicy, num_loss: int, device_type: str
    ) -> None:
        if isinstance(num_loss, bool) or not isinstance(num_loss, int) or num_loss < 1:
            raise ValueError(f"num_loss must be a whole number above 0, found {num_loss!r}")
        (self.optimizer,) = _checked([optimizer])
        skips = SkippedSteps()
        each = range(num_loss)
        self.losses = [ScaledLosses(copy.deepcopy(policy), device_type, skips) for _ in each]
        self._next = 0
        self._left = False  # whether the last loss has left gradients

    @property
    def loss_scalers(self) -> list[ScalePolicy]:
        """The policy of each loss."""
        return [losses.loss_scaler for losses in self.losses]

    def scale_loss(self, loss: Tensor) -> AbstractContextManager[Tensor]:
        """As AmpHandle.scale_loss; RuntimeError for more than num_loss losses between two steps."""
        # Or the last losses were given up without a step.
        groups = self.optimizer.param_groups
        known = self._next > 0 and on_any_process(groups, self._left)
        if known and are_gone(all_parameters([self.optimizer]), groups):
            self._next = 0
            for losses in self.losses:
                losses.give_up()
        if self._next == len(self.losses):
            raise RuntimeError(
                f"scale_loss was called more than num_loss={self._next} times before a step; "
                f"wrap_optimizer(optimizer, num_loss={self._next + 1}) gives each loss a scale"
            )
        self._next += 1
        return self._block(loss, self.losses[self._next - 1])

    @contextmanager
    def _block(self, loss: Tensor, losses: ScaledLosses) -> Iterator[Tensor]:
        with losses.block(loss, self.optimizer) as scaled:
            yield scaled
        params = all_parameters([self.optimizer])
        self._left = any(param.grad is not None for param in params)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's step, which changes nothing if a loss has overflowed; without closure."""
        if closure is not None:  # its losses cannot be scaled from here
            instead = "use amp.FP16_Optimizer, which does"
            raise NotImplementedError(f"a wrapped optimizer takes no closure; {instead}")
        self._next = 0
        return self.optimizer.step()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet: being copied or unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"OptimWrapper({self.optimizer!r}, loss_scalers={self.loss_scalers!r})"
