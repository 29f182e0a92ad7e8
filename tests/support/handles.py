"""A weight on a device, and optimizers for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import amp_mp as amp

LOW = [torch.float16, torch.bfloat16]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch SGD": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5, weight_decay=0.5),
    "torch AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "amp SGD": lambda params: amp.optim.SGD(params, lr=0.5, momentum=0.5, weight_decay=0.5),
    "amp AdamW": lambda params: amp.optim.AdamW(params, lr=0.01),
    "amp AdamW, clipping": lambda params: amp.optim.AdamW(params, lr=0.01, max_grad_norm=1.0),
}
Start = Callable[..., Any]


def weight_on(device: str, value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full((2, 2), value, device=device))


def scaled_backward(handle: Any, loss: torch.Tensor, *optimizer: Any) -> None:
    """The block of every script; `handle` may be an optimizer of handle.wrap_optimizer."""
    with handle.scale_loss(loss, *optimizer) as scaled_loss:
        scaled_loss.backward()
