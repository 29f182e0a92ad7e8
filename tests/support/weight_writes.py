"""Ways to write a weight, each as users do it; many of them advance no version counter."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import amp_mp as amp

Write = Callable[[nn.Linear], object]


def new(m: nn.Linear) -> Tensor:
    """The values to write."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(m.weight.shape, generator=generator).to(m.weight.device)


def mask(m: nn.Linear) -> Tensor:
    return new(m) > 0


def rows(m: nn.Linear) -> Tensor:
    return torch.arange(0, m.weight.shape[0], 2, device=m.weight.device)


def under(context: Callable[[], torch.autograd.grad_mode.no_grad], write: Write) -> Write:
    def wrapped(m: nn.Linear) -> None:
        with context():
            write(m)

    return wrapped


def step(optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Write:
    def write(m: nn.Linear) -> None:
        m.weight.grad = new(m)
        optimizer([m.weight]).step()
        m.weight.grad = None

    return write


def average(m: nn.Linear) -> None:
    """The weights of an average, copied in for evaluation."""
    averaged = torch.optim.swa_utils.AveragedModel(m)
    with torch.no_grad():
        averaged.module.weight.copy_(new(m))
    for param, mean in zip(m.parameters(), averaged.parameters(), strict=True):
        param.data.copy_(mean.data)


def by_hand(m: nn.Linear) -> None:
    m.weight.grad = new(m)
    m.weight.data -= 0.5 * m.weight.grad
    m.weight.grad = None


def memory(m: nn.Linear) -> None:
    other = new(m)
    ctypes.memmove(m.weight.data_ptr(), other.data_ptr(), other.nbytes)


def pruned(m: nn.Linear) -> None:
    prune.l1_unstructured(m, "weight", amount=0.5)
    prune.remove(m, "weight")


WRITES: dict[str, Write] = {
    "copy_": under(torch.no_grad, lambda m: m.weight.copy_(new(m))),
    "mul_ in inference mode": under(torch.inference_mode, lambda m: m.weight.mul_(0.5)),
    "detach().copy_": lambda m: m.weight.detach().copy_(new(m)),
    "data.copy_": lambda m: m.weight.data.copy_(new(m)),
    "data.zero_": lambda m: m.weight.data.zero_(),
    "data.fill_": lambda m: m.weight.data.fill_(0.25),
    "data.mul_": lambda m: m.weight.data.mul_(-0.5),
    "data.clamp_": lambda m: m.weight.data.clamp_(-0.01, 0.01),
    "data.normal_": lambda m: m.weight.data.normal_(),
    "data[...] =": lambda m: m.weight.data.__setitem__(slice(0, 9), 1.0),
    "data.view(-1)[...] =": lambda m: m.weight.data.view(-1).__setitem__(slice(0, 999), 1.0),
    "data.masked_fill_": lambda m: m.weight.data.masked_fill_(mask(m), 0.0),
    "data.index_fill_": lambda m: m.weight.data.index_fill_(0, rows(m), 0.0),
    "data.lerp_": lambda m: m.weight.data.lerp_(new(m), 0.5),
    "data -= lr * grad": by_hand,
    "data =": lambda m: setattr(m.weight, "data", new(m)),
    "clamp, out=data": lambda m: torch.clamp(m.weight.data, 0.0, 0.1, out=m.weight.data),
    "add, out=data": lambda m: torch.add(m.weight.data, new(m), out=m.weight.data),
    "_foreach_mul_ of data": lambda m: torch._foreach_mul_([m.weight.data], 0.5),
    "_foreach_copy_ of data": lambda m: torch._foreach_copy_([m.weight.data], [new(m)]),
    "numpy": lambda m: numpy.multiply(m.weight.data.numpy(), 0.5, out=m.weight.data.numpy()),
    "dlpack": lambda m: torch.from_dlpack(m.weight.detach()).mul_(0.5),
    "numpy through dlpack": lambda m: numpy.copyto(m.weight.detach().numpy(), new(m).numpy()),
    "memmove": memory,
    "storage": lambda m: m.weight.untyped_storage().copy_(new(m).untyped_storage()),
    "load_state_dict": lambda m: m.load_state_dict({"weight": new(m)}),
    "load_state_dict, assign": lambda m: m.load_state_dict({"weight": new(m)}, assign=True),
    "a new parameter": lambda m: setattr(m, "weight", nn.Parameter(new(m))),
    "swap_tensors": lambda m: torch.utils.swap_tensors(m.weight, nn.Parameter(new(m))),
    "vector_to_parameters": lambda m: nn.utils.vector_to_parameters(
        new(m).flatten(), m.parameters()
    ),
    "init": lambda m: nn.init.ones_(m.weight),
    "reset_parameters": lambda m: m.reset_parameters(),
    "to float64 and back": lambda m: m.double().float().weight.data.mul_(2),
    "averaged weights": average,
    "pruning": pruned,
    "torch SGD": step(lambda p: torch.optim.SGD(p, lr=0.5)),
    "torch SGD, fused": step(lambda p: torch.optim.SGD(p, lr=0.5, fused=True)),
    "torch AdamW, fused": step(lambda p: torch.optim.AdamW(p, lr=0.5, fused=True)),
    "torch AdamW, foreach": step(lambda p: torch.optim.AdamW(p, lr=0.5, foreach=True)),
    "amp SGD": step(lambda p: amp.optim.SGD(p, lr=0.5)),
    "amp AdamW": step(lambda p: amp.optim.AdamW(p, lr=0.5)),
}
# They need memory that the host can write.
ON_A_CPU = {"numpy", "numpy through dlpack", "dlpack", "memmove"}
