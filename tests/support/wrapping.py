"""A model of two precisions, and FP16_Optimizer around its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from helpers import raw_bytes
from torch import Tensor, nn

import amp_mp as amp

LOW = [torch.float16, torch.bfloat16]
INNER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "torch Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "torch AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "amp SGD": lambda params: amp.optim.SGD(params, lr=0.05, momentum=0.9, master="float32"),
    "amp AdamW": lambda params: amp.optim.AdamW(params, lr=0.01, master="float32"),
}


class Mixed(nn.Module):
    """A low-precision layer, then a float32 one."""

    def __init__(self, dtype: torch.dtype, inputs: int = 4) -> None:
        super().__init__()
        self.low = nn.Linear(inputs, 3, dtype=dtype)
        self.high = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.high(self.low(x.to(self.low.weight.dtype)).float())


def wrap(
    inner: torch.optim.Optimizer, verbose: bool = False, **arguments: Any
) -> amp.FP16_Optimizer:
    return amp.FP16_Optimizer(inner, verbose=verbose, **arguments)


def masters_of(optimizer: amp.FP16_Optimizer) -> list[Tensor]:
    """In the order of the parameters; amp_mp's optimizers have theirs in the state."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [optimizer.state.get(p, {}).get("master", p) for p in params]


def train_step(model: nn.Module, optimizer: amp.FP16_Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    optimizer.backward(model(x).float().square().mean())
    optimizer.step()


def everything(model: nn.Module, optimizer: amp.FP16_Optimizer) -> Any:
    """Every byte that a skipped step must leave alone: model, masters, inner state."""
    state = optimizer.state_dict()
    inner = state["optimizer_state_dict"]["state"]
    return raw_bytes([model.state_dict(), state["fp32_from_fp16"], inner])
