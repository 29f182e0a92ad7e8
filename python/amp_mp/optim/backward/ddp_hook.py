"""The communication hook of DistributedDataParallel that gives averaged gradients to optimizers."""

import weakref
from collections.abc import MutableMapping, MutableSet
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class DDPHook:
    """A model's communication hook: averages over the ranks, then the attached optimizers step.

    DistributedDataParallel takes one hook and never removes it, so the model keeps this one for
    life. With no optimizer attached it does what the model does without a hook.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        """Registers itself; raises ValueError where the model has another hook."""
        self._group = model.process_group
        self.steppers: MutableSet[Any] = weakref.WeakSet()  # Release: they get the gradients
        try:
            # A lambda has no annotations: torch refuses a bucket that is annotated as Any.
            model.register_comm_hook(self, lambda state, bucket: state.reduce(bucket))
        except RuntimeError as error:
            raise ValueError(
                "model has a communication hook of its own already, and attach needs that "
                "place: DistributedDataParallel takes one hook; leave out register_comm_hook"
            ) from error

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """The hook; bucket: a torch.distributed.GradBucket."""
        buffer, params = bucket.buffer(), bucket.parameters()
        grads = bucket.gradients() or [buffer]  # none of a sparse one, which the step refuses
        buffer.mul_(1.0 / self._group.size())  # this very product: that is how torch divides
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        future: torch.futures.Future[list[Tensor]] = work.get_future()

        def step(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            for param, grad in zip(params, grads, strict=True):
                if grad.layout == torch.strided:
                    # The bucket holds elements in the parameter's memory order, and gradients()
                    # has forgotten that of channels_last ones.
                    grad = grad.as_strided(param.shape, param.stride())
                for stepper in self.steppers:
                    stepper.arrive_averaged(param, grad)
            return done.value()[0]

        return future.then(step)


_hooks: MutableMapping[DistributedDataParallel, DDPHook] = weakref.WeakKeyDictionary()


def ddp_hook_of(model: DistributedDataParallel) -> DDPHook:
    """The model's hook, made at the first call."""
    if model not in _hooks:
        _hooks[model] = DDPHook(model)
    return _hooks[model]
