"""A small model, its training, and its masters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import amp_mp as amp

LOW = [torch.bfloat16, torch.float16]
STORAGES: dict[str, dict[str, Any]] = {
    "float32": {"master": "float32"},
    "exact": {"memory": "exact"},
    "lean": {"memory": "lean"},
    "tiny": {"memory": "tiny"},
    "micro": {"memory": "micro"},
    "nano": {"memory": "nano"},
    "masterless": {"memory": "masterless"},
}


class Model(nn.Module):
    """A tied weight, a norm that stays float32, statistics, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 32)
        self.norm = nn.BatchNorm1d(32)
        self.inner = nn.Linear(32, 32)
        self.head = nn.Linear(32, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.rand(32))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embed(tokens)) + self.table
        return self.head(torch.tanh(self.inner(hidden)))


def make(device: str, dtype: torch.dtype = torch.bfloat16, **storage: Any) -> tuple[Model, Any]:
    model = Model().to(device)
    if dtype != torch.float32:
        amp.prepare(model, dtype)
    return model, amp.optim.AdamW(model.parameters(), lr=3e-3, **storage)


def train(model: nn.Module, optimizer: Any, steps: int = 1, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    for _ in range(steps):
        tokens = torch.randint(11, (16,), generator=generator).to(device)
        loss = nn.functional.cross_entropy(model(tokens).float(), (tokens + 1) % 11)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def rounded_weights(model: nn.Module) -> nn.Module:
    """The model without the float32 values that prepare keeps until the first step."""
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.clone())
    return model
