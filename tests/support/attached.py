"""A model with a tied weight, and how it is trained with an attached optimizer."""

from __future__ import annotations

from typing import Any

import torch
from helpers import raw_bytes
from torch import Tensor, nn

import amp_mp as amp

LOW = torch.bfloat16
SCALE = 2.0**10


class Tied(nn.Module):
    """A weight used twice, a normalisation and a bias: matrices, vectors, one of each."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.last = nn.Linear(64, 8, bias=False)

    def forward(self, x: Tensor, inner_alone: bool = False) -> Tensor:
        hidden = self.inner(self.inner(x).tanh())
        if inner_alone:
            return self.norm(hidden)
        return self.last(self.norm(hidden.to(self.norm.weight.dtype)).to(x.dtype))


def model(device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    net = Tied().to(device)
    return net if dtype == torch.float32 else amp.prepare(net, dtype)


def loss_of(net: nn.Module, step: int) -> Tensor:
    weight = next(net.parameters())
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
    return net(x.to(weight.device, weight.dtype)).float().square().mean()


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return raw_bytes([dict(net.named_parameters()), optimizer.state_dict()])


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
