"""Settings of layer types, and a network that has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
# Types by name: all in half; half storage with float32 arithmetic; float32 gradients; two maths.
HALF = {"default_forward_type": "FLOAT16", "default_backward_type": "FLOAT16"}
PSEUDO = HALF | {"default_forward_math": "FLOAT", "default_backward_math": "FLOAT"}
MIXED = {"default_forward_type": "FLOAT16", "default_forward_math": "FLOAT"}
APART = HALF | {"default_backward_math": "FLOAT"}
SETTINGS = {"half": HALF, "pseudo": PSEUDO, "mixed": MIXED, "apart": APART}


def network(device: str) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(54, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 4)),
    ).to(device)


def images(device: str) -> Tensor:
    return torch.randn(8, 3, 8, 8, device=device)


def gradients(net: nn.Module, call: Callable[..., Any], *inputs: Tensor) -> list[Tensor]:
    """What the call returns, and the parameters' gradients of its sum of squares."""
    torch.manual_seed(1)
    net.zero_grad()
    output = call(*inputs)
    output.float().square().sum().backward()
    return [output.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
