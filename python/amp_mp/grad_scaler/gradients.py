"""What a GradScaler asks about the gradients of an optimizer, and adds up over devices."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_mp.dtypes import NATIVE
from amp_mp.optim.base import FusedOptimizer

LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def check_gradients(optimizer: FusedOptimizer) -> None:
    """Raises AssertionError, in torch's words, where no backward was called before the step."""
    grads = (p.grad for group in optimizer.param_groups for p in group["params"])
    if any(grad is not None for grad in grads):
        return
    if optimizer.attachment is None or not optimizer.attachment.has_released():
        raise AssertionError(
            "No inf checks were recorded for this optimizer: none of its parameters has a "
            "gradient. Call scaler.scale(loss).backward() before scaler.step(optimizer)"
        )


def combined(
    states: list[dict[str, Any]], key: str, device: torch.device, combine: Callable[..., Tensor]
) -> Tensor | None:
    """The optimizers' numbers of all devices as one on this device; None if there are none."""
    numbers = [x.to(device) for state in states for x in state.get(key, {}).values()]
    if len(numbers) > 1:
        return combine(torch.stack(numbers))
    return numbers[0] if numbers else None


def plain_gradients(optimizer: Optimizer) -> list[Tensor] | None:
    """The gradients; None if torch must handle one of them (sparse, a DTensor, float64)."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads = [param.grad for param in params if param.grad is not None]
    plain = all(
        type(grad) is Tensor
        and grad.dtype in NATIVE
        and grad.layout == torch.strided
        and any(grad.is_contiguous(memory_format=layout) for layout in LAYOUTS)
        for grad in grads
    )
    return grads if plain else None
