"""Small models with optimizers, for tests of checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from helpers import raw_bytes
from torch import Tensor, nn

import amp_mp as amp

LOW = torch.bfloat16
PRESETS = ("float32", "exact", "lean", "tiny", "micro", "masterless")
# A stored master's largest relative error is 2^-MASTER_BITS; 24: none. docs/formats.md.
MASTER_BITS = {"float32": 24, "exact": 24, "lean": 16, "tiny": 16, "micro": 16, "masterless": 8}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 3))


def make(preset: str, dtype: torch.dtype | None = LOW, **options: Any) -> tuple[nn.Module, Any]:
    """A model, prepared unless dtype is None, and its AdamW."""
    model = network()
    if dtype is not None:
        model = amp.prepare(model, dtype)
    return model, amp.optim.AdamW(model.parameters(), lr=1e-2, memory=preset, **options)


def train(model: nn.Module, optimizer: Any, steps: int, seed: int = 0) -> None:
    for step in range(steps):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed + step))
        optimizer.zero_grad()
        model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()


def snapshot(model: nn.Module, optimizer: Any = None) -> dict[str, bytes]:
    """The bits of everything that loading may change."""
    found = {f"weight {name}": raw_bytes(p) for name, p in model.state_dict().items()}
    states = {} if optimizer is None else optimizer.state_dict()["state"]
    for number, state in states.items():
        found |= {f"{number} {k}": raw_bytes(v) for k, v in state.items() if isinstance(v, Tensor)}
    if optimizer is not None:
        found["groups"] = repr(optimizer.state_dict()["param_groups"]).encode()
    return found


def masters(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """The float32 values of the model's parameters."""
    return amp.float32_state_dict(model, optimizer)
