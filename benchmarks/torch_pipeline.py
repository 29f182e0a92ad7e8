"""A step of mixed precision with torch alone, and the same by amp_mp: what benchmarks compare."""

from __future__ import annotations

from collections.abc import Callable

import torch

import amp_mp as amp

SCALE = 2.0**10


def pipeline(
    model: list[torch.nn.Parameter],
    masters: list[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    device: str,
) -> Callable[[], None]:
    """A step: cast the gradients to float32, unscale, clip, update the masters, cast back."""
    scaler = torch.amp.GradScaler(device, init_scale=SCALE)
    scaler.scale(torch.ones((), device=device))

    def step() -> None:
        for master, param in zip(masters, model, strict=True):
            master.grad = param.grad.float()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            torch._foreach_copy_(model, masters)

    return step


def scaled(optimizer: torch.optim.Optimizer, device: str) -> Callable[[], None]:
    """The same by amp_mp: its scaler's step of an optimizer with max_grad_norm, and update."""
    scaler = amp.GradScaler(device, init_scale=SCALE)
    scaler.scale(torch.ones((), device=device))

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return step
