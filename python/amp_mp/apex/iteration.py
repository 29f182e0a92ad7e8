"""An iteration of scale_loss: the losses before a step, and the skipped step after an overflow."""

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor
from torch.optim.optimizer import Optimizer

from amp_mp.apex.fp16_utils import master_params
from amp_mp.casting.autocast import steps_taken
from amp_mp.optim.step.gradient_marks import GradientMarks
from amp_mp.scaling.observe import OverflowCounter, describe_nonfinite, update_scale
from amp_mp.scaling.policies import ScalePolicy


@dataclass
class Iteration:
    """What a policy was told since the last step of any optimizer, and its state before that."""

    steps: int
    policy_before: dict[str, Any]
    counter_before: OverflowCounter
    counter: OverflowCounter
    found_inf: bool = False
    max_abs: float = 0.0
    marks: list[GradientMarks] = field(default_factory=list)  # after each loss
    skipped: WeakSet[Optimizer] = field(default_factory=WeakSet)  # whose next step does nothing

    given_up: bool = False

    def is_over(self) -> bool:
        """Whether an optimizer has stepped since, or the gradients are gone without a step.

        They are in a loop that goes on with the next batch after an overflow, and in one that
        writes its updates by hand.
        """
        stepped = self.steps != steps_taken()
        return (
            stepped
            or self.given_up
            or (bool(self.marks) and all(each.are_gone() for each in self.marks))
        )


_iterations: WeakKeyDictionary[ScalePolicy, Iteration] = WeakKeyDictionary()


def give_up(policy: ScalePolicy) -> None:
    """Ends a policy's iteration: its gradients were cleared, and there may be new ones already."""
    if policy in _iterations:
        _iterations[policy].given_up = True


def begin(policy: ScalePolicy) -> Iteration:
    """The iteration to which a loss belongs: a new one where the last one is over."""
    last = _iterations.get(policy)
    if last is None or last.is_over():
        counter = OverflowCounter() if last is None else last.counter
        if last is not None and last.steps == steps_taken():
            for optimizer in last.skipped:  # what it should have skipped is gone
                step_again(optimizer)
        before = policy.state_dict(), copy.copy(counter)
        last = _iterations[policy] = Iteration(steps_taken(), *before, counter)
    return last


def update_scale_once(
    policy: ScalePolicy,
    iteration: Iteration,
    found_inf: bool,
    max_abs: float,
    optimizers: list[Optimizer],
) -> bool:
    """Moves the scale once per iteration: several losses before a step count as one.

    The first loss moves it at once, so that the scale has fallen when the block ends. A later loss
    goes back to the scale at the iteration's start and counts all losses together. Returns whether
    this is the iteration's first overflow.
    """
    is_first = found_inf and not iteration.found_inf
    iteration.found_inf |= found_inf
    iteration.max_abs = max(iteration.max_abs, max_abs)
    policy.load_state_dict(iteration.policy_before)
    iteration.counter = counter = copy.copy(iteration.counter_before)
    describe = partial(describe_nonfinite, [each.param_groups for each in optimizers])
    update_scale(policy, counter, iteration.found_inf, iteration.max_abs, describe)
    return is_first


def all_parameters(optimizers: list[Optimizer]) -> list[Tensor]:
    """Each once, also where optimizers share it."""
    return list(dict.fromkeys(param for each in optimizers for param in master_params(each)))


def skip_next_step(optimizer: Optimizer) -> None:
    """Hides the gradients from the next step, which does nothing but still counts as a step."""
    if getattr(optimizer, "_amp_mp_skip", None):
        return  # two overflows before a step are one skip
    aside: list[tuple[Tensor, Tensor]] = []

    def before(*_: Any) -> None:
        for param in all_parameters([optimizer]):
            if param.grad is not None:
                aside.append((param, param.grad))
                param.grad = None

    def after(*_: Any) -> None:
        step_again(optimizer)
        for param, grad in aside:
            param.grad = grad

    hooks = (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after))
    optimizer._amp_mp_skip = hooks  # type: ignore[attr-defined]


def step_again(optimizer: Optimizer) -> None:
    """Takes back what skip_next_step did."""
    for hook in getattr(optimizer, "_amp_mp_skip", None) or ():
        hook.remove()
    optimizer._amp_mp_skip = None  # type: ignore[attr-defined]
