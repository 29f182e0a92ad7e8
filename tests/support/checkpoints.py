"""Small models with optimizers, for tests of checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from helpers import raw_bytes
from torch import Tensor, nn

import amp_mp as amp

LOW = torch.bfloat16
LIMIT_S = 60.0  # for a gate that nobody opens
PRESETS = ("float32", "exact", "lean", "tiny", "micro", "nano", "masterless")
# A stored master's largest relative error is 2^-MASTER_BITS; 24: none. docs/formats.md.
MASTER_BITS = {"float32": 24, "exact": 24, "lean": 16, "tiny": 16, "micro": 16, "nano": 11}
MASTER_BITS["masterless"] = 8


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


class Gate:
    """A value to save that the thread cannot write until the gate is open."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __deepcopy__(self, memo: Any) -> Gate:
        return self

    def __reduce__(self) -> Any:
        assert self.opened.wait(LIMIT_S)
        return str, ("open",)


@contextmanager
def under_way(path: Path, *parts: Any, **more: Any) -> Iterator[Any]:
    """A save that is not complete in the block, and is after it."""
    gate = Gate()
    pending = amp.checkpoint.save(path, *parts, wait=False, gate=gate, **more)
    try:
        assert not pending.done()
        yield pending
        assert not pending.done()
    finally:
        gate.opened.set()
    pending.wait()
    assert pending.done()


def caught(call: Any, *arguments: Any, **more: Any) -> str:
    """The error of a call, with the notes that it has."""
    try:
        call(*arguments, **more)
    except Exception as error:
        return " ".join([type(error).__name__, str(error), *getattr(error, "__notes__", [])])
    return ""
