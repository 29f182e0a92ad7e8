"""Models, optimizers and oracles for the tests of apex.amp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from amp_mp.apex import amp

LOW = [torch.float16, torch.bfloat16]


def forget() -> None:
    """As if initialize had never been called in this process."""
    amp.initialize(nn.Linear(1, 1), enabled=False, verbosity=0)
    amp._amp_state.opt_properties = None


class Weight(nn.Module):
    """w * x, summed."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(values)

    def forward(self, x: Tensor) -> Tensor:
        """A number."""
        return (self.w * x).sum()


def network(seed: int = 0) -> nn.Sequential:
    """Layers of each kind that O2 treats: products and a batch norm."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def batch(seed: int = 1, rows: int = 32) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 4, generator=generator)


def backward(loss: Tensor, optimizers: Any, loss_id: int = 0, **how: Any) -> None:
    """The block of every script."""
    with amp.scale_loss(loss, optimizers, loss_id, **how) as scaled_loss:
        scaled_loss.backward()


def train(model: nn.Module, optimizer: Any, steps: int = 5, seed: int = 1) -> list[float]:
    """Losses of some steps."""
    found = []
    for step in range(steps):
        x, y = batch(seed + step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        backward(loss, optimizer)
        optimizer.step()
        found.append(loss.item())
    return found
