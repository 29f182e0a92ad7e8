"""A training on a CUDA device of which everything can be compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import raw_bytes
from torch import nn

import amp_mp as amp

DEVICE = "cuda"
SHAPES = [(33, 64), (64,), (7,), (0,), (3, 32)]


class Training:
    """A few parameters, an optimizer and a scaler; gradients are written where they are."""

    def __init__(
        self,
        loss_scale: Any = None,
        memory: str | None = None,
        lr: Any = 1e-2,
        shapes: list[tuple[int, ...]] = SHAPES,
        **arguments: Any,
    ) -> None:
        source = torch.Generator().manual_seed(3)
        low = torch.bfloat16
        self.params = [
            nn.Parameter(torch.randn(s, generator=source).to(DEVICE, low)) for s in shapes
        ]
        for p in self.params:
            p.grad = torch.zeros_like(p)
        self.optimizer = self.optimizer_of(lr, memory=memory, max_grad_norm=1.0, **arguments)
        self.scaler = amp.GradScaler(
            DEVICE, init_scale=2.0**10, growth_interval=3, loss_scale=loss_scale
        )
        self.scaler.scale(torch.ones((), device=DEVICE))

    def optimizer_of(self, lr: Any, kind: Any = amp.optim.AdamW, **arguments: Any) -> Any:
        """The optimizer of all params."""
        return kind(self.params, lr=lr, **arguments)

    def fill(self, step: int, overflows: bool) -> None:
        """Scaled gradients, the same for every training at that step and scale."""
        source = torch.Generator().manual_seed(100 + step)
        scale = self.scaler._scale
        for p in self.params:
            values = torch.randn(p.shape, generator=source).to(DEVICE)
            p.grad.copy_(values * scale * 2.0 ** -(step % 5))
        if overflows:
            filled = [p for p in self.params if p.numel()]
            filled[step % len(filled)].grad.view(-1)[-1] = float("inf")

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state(self) -> Any:
        state = self.optimizer.state_dict()["state"]
        return raw_bytes([[p.detach() for p in self.params], state, self.scaler.state_dict()])


def captured(graphed: Training, eager: Training, steps: int = 2) -> torch.cuda.CUDAGraph:
    """A graph of the next step of `graphed`, after as many equal steps of both."""
    for step in range(steps):
        for training in (graphed, eager):
            training.fill(step, False)
            training.step()
    assert graphed.state() == eager.state()
    return graph_of(graphed)


def graph_of(training: Any) -> torch.cuda.CUDAGraph:
    """A graph of the next step of an optimizer, or of a training; that step is not made."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.step()
    return graph


@contextmanager
def refused_capture(error: type[Exception], match: str) -> Iterator[None]:
    """A block that cannot be captured."""
    with pytest.raises(error, match=match), torch.cuda.graph(torch.cuda.CUDAGraph()):
        yield
