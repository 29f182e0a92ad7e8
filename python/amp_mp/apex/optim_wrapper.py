"""handle.wrap_optimizer: an optimizer with one loss scale for each of its losses."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from amp_mp.apex.scale_loss import scaled_loss
from amp_mp.scaling.policies import ScalePolicy


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
    else is the optimizer's own, `optimizer`, which is what a scheduler is given.
    """

    def __init__(
        self, optimizer: Optimizer, policy: ScalePolicy, num_loss: int, device: str
    ) -> None:
        """Use AmpHandle.wrap_optimizer. Each loss gets its own copy of the policy."""
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

    @contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """As AmpHandle.scale_loss, with the scale of the next loss.

        Raises RuntimeError for more losses than num_loss between two steps.
        """
        if self._next == len(self.loss_scalers):
            raise RuntimeError(
                f"scale_loss was called more than num_loss={self._next} times before a step; "
                f"wrap_optimizer(optimizer, num_loss={self._next + 1}) gives each loss a scale"
            )
        policy = self.loss_scalers[self._next]
        self._next += 1
        with scaled_loss(loss, self.optimizer, policy, self._device) as scaled:
            yield scaled

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's step, which changes nothing if a loss has overflowed.

        Raises NotImplementedError for a closure: its losses cannot be scaled from here. Pass it to
        an FP16_Optimizer.
        """
        if closure is not None:
            raise NotImplementedError(
                "a wrapped optimizer takes no closure; use amp.FP16_Optimizer, which does"
            )
        self._next = 0
        return self.optimizer.step()

    def __getattr__(self, name: str) -> Any:
        """Everything else: param_groups, state, zero_grad, state_dict, add_param_group."""
        if name == "optimizer":  # not there yet: being copied or unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        """The optimizer and its scales."""
        return f"OptimWrapper({self.optimizer!r}, loss_scalers={self.loss_scalers!r})"
