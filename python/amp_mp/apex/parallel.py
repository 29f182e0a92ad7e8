"""apex.parallel: data parallelism over torch's own, synchronised batch norms, and LARC."""

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from amp_mp.torch_private import foreach_div_
from amp_mp.wrappers.larc import LARC

__all__ = ["LARC", "DistributedDataParallel", "Reducer", "SyncBatchNorm", "convert_syncbn_model"]
# Arguments that would change what a script finds, and what to do instead.
REFUSED = {
    "shared_param": "leave it out, parameters that share memory are found",
    "retain_allreduce_buffers": "read param.grad, there are no allreduce_buffers",
    "allreduce_communicators": "pass process_group to torch's DistributedDataParallel",
    "gradient_average_split_factor": "use gradient_predivide_factor",
}
# When and in how many pieces gradients are added up, which changes no result.
WITHOUT_EFFECT = ("message_size", "allreduce_trigger_params", "num_allreduce_streams", "prof")


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel with Apex's arguments; buffers stay each process's own.

    Args:
        delay_allreduce: lets some parameters have no gradient. Default False.
        allreduce_always_fp32: gradients are added up in float32. Default False.
        gradient_average: divide the sum by the number of processes. Default True.
        gradient_predivide_factor: the gradients are divided by it before they are added, their
            average is multiplied by it again. Default 1.0.
        message_size, allreduce_trigger_params, num_allreduce_streams, prof: no effect.

    Raises ValueError naming one of Apex's other arguments, TypeError for any other.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        *,
        allreduce_always_fp32: bool = False,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        **others: Any,
    ) -> None:
        for name in (n for n, value in others.items() if n not in WITHOUT_EFFECT):
            if name not in REFUSED:
                raise TypeError(f"DistributedDataParallel of apex has no argument {name!r}")
            if others[name]:
                raise ValueError(f"{name}={others[name]!r} is not supported: {REFUSED[name]}")
        super().__init__(module, find_unused_parameters=delay_allreduce)
        self.broadcast_buffers = False
        before, after = 1.0 / gradient_predivide_factor, 1.0
        if gradient_average:
            after = gradient_predivide_factor / dist.get_world_size()

        def add_up(_, bucket) -> torch.futures.Future[Tensor]:  # type: ignore[no-untyped-def]
            buffer: Tensor = bucket.buffer()
            sent = buffer.float() if allreduce_always_fp32 else buffer
            work: Any = dist.all_reduce(sent.mul_(before), async_op=True)
            done: Any = work.get_future()
            return done.then(lambda future: buffer.copy_(future.value()[0].mul_(after)))  # type: ignore[no-any-return]

        if allreduce_always_fp32 or not gradient_average or gradient_predivide_factor != 1.0:
            self.register_comm_hook(None, add_up)

    def disable_allreduce(self) -> None:
        """Gradients stay each process's own until enable_allreduce."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Gradients are averaged in the backward of the next forward."""
        self.require_backward_grad_sync = True


class Reducer:
    """Averages gradients over the processes when `reduce` is called.

    module_or_grads_list: a module, whose parameters become those of process 0, or tensors.
    """

    def __init__(self, module_or_grads_list: Any) -> None:
        self.module = None
        self.grads = module_or_grads_list
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            for param in self.module.parameters():
                dist.broadcast(param.detach(), 0)

    def reduce(self) -> None:
        """Averages in place; a parameter without a gradient must be without on all processes."""
        grads = self.grads if self.module is None else [p.grad for p in self.module.parameters()]
        present = [grad for grad in grads if grad is not None]
        for work in [dist.all_reduce(grad, async_op=True) for grad in present]:
            work.wait()
        foreach_div_(present, float(dist.get_world_size()))


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's; channel_last: of inputs (N, *, C). fuse_relu: relu(norm(input) + z)."""

    channel_last = fuse_relu = False

    def __init__(
        self, *args: Any, channel_last: bool = False, fuse_relu: bool = False, **named: Any
    ) -> None:
        super().__init__(*args, **named)
        self.channel_last, self.fuse_relu = channel_last, fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """The normalised input plus z, if given, of its shape."""
        last = -1 if self.channel_last else 1
        found = super().forward(input.movedim(last, 1)).movedim(1, last)
        found = found if z is None else found + z
        return functional.relu(found) if self.fuse_relu else found


def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> Any:
    """torch's convert_sync_batchnorm to SyncBatchNorm of here."""
    convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
    made = convert(module, process_group)
    torchs: list[Any] = [each for each in made.modules() if type(each) is nn.SyncBatchNorm]
    for each in torchs:
        each.__class__ = SyncBatchNorm
        each.channel_last = channel_last
    return made
