"""What loss scaling notes of gradients and masters keeps no tensor alive and binds no weight."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_mp as amp

Loop = Callable[[nn.Linear], tuple[Any, Callable[[Tensor], None]]]


def by_wrapper(model: nn.Linear) -> tuple[Any, Callable[[Tensor], None]]:
    optimizer = amp.FP16_Optimizer(
        amp.optim.SGD(model.parameters(), lr=0.125), verbose=False, dynamic_loss_scale=True
    )
    return optimizer, optimizer.backward


def by_handle(model: nn.Linear) -> tuple[Any, Callable[[Tensor], None]]:
    device = model.weight.device.type
    handle = amp.init(device_type=device, dtype=torch.float16, loss_scale=8.0)
    handle.deactivate()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)

    def backward(loss: Tensor) -> None:
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()

    return optimizer, backward


LOOPS: dict[str, Loop] = {"FP16_Optimizer": by_wrapper, "handle": by_handle}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_cleared_gradient_is_freed(device: str, loop: str) -> None:
    model = nn.Linear(4, 4).to(device, torch.float16)
    optimizer, backward = LOOPS[loop](model)
    backward(model.weight.float().sum())
    assert model.weight.grad is not None
    freed = weakref.ref(model.weight.grad)
    optimizer.zero_grad()
    assert freed() is None


@pytest.mark.parametrize("loop", LOOPS)
def test_a_parameter_may_be_swapped_after_a_loss(device: str, loop: str) -> None:
    """torch refuses to swap a tensor that anything refers to weakly."""
    model = nn.Linear(4, 4).to(device)
    _, backward = LOOPS[loop](model)
    backward(model.weight.sum())
    other = nn.Parameter(torch.full((4, 4), 3.0, device=device))
    torch.utils.swap_tensors(model.weight, other)
    assert (model.weight == 3).all()


@pytest.mark.parametrize("package", [torch.optim, amp.optim])
def test_a_weight_is_freed_with_its_model_and_optimizer(device: str, package: Any) -> None:
    def train() -> weakref.ref[Tensor]:
        model = nn.Linear(4, 4).to(device, torch.float16)
        inner = package.SGD(model.parameters(), lr=0.125)
        for _ in range(2):
            optimizer = amp.FP16_Optimizer(inner, verbose=False)
            optimizer.backward(model.weight.float().sum())
            optimizer.step()
        return weakref.ref(model.weight)

    weight = train()
    gc.collect()
    assert weight() is None
