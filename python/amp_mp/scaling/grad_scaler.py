"""torch's GradScaler with native passes: gradients are read once and written never."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.optim.base import FusedOptimizer

NATIVE = (torch.float32, torch.float16, torch.bfloat16)


class GradScaler(torch.amp.GradScaler):
    """A torch.amp.GradScaler; arguments, methods and state_dict are torch's.

    With an amp_mp optimizer `step` reads the gradients once, which yields the overflow check and
    the norm for clipping, and hands the scale to the optimizer's own pass: torch reads and writes
    them for the check alone. With another optimizer it unscales natively, once. float16 gradients
    are accepted either way.

    Args:
        device: "cuda" or "cpu"; default: "cuda" where there is one.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as torch.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        """See the class."""
        super().__init__(
            device or ("cuda" if torch.cuda.is_available() else "cpu"),
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Called by torch's step for optimizers that unscale themselves: one read, no write."""
        if isinstance(optimizer, FusedOptimizer):
            found: dict[Any, Tensor] = optimizer.measure_gradients()
        else:
            by_device = _plain_gradients(optimizer)
            if by_device is None:
                return super()._check_inf_per_device(optimizer)
            found = {device: _non_finite(grads) for device, grads in by_device.items()}
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """One native read, one native write, whatever the dtype."""
        scale = self._scale
        by_device = _plain_gradients(optimizer)
        if by_device is None or scale is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found = {}
        for device, grads in by_device.items():
            found[device] = _non_finite(grads)
            verdict = torch.empty(_C.VERDICT_SIZE, dtype=torch.float64, device=device)
            _C.decide_(verdict, scale=scale.to(device))
            _C.copy_(grads, grads, verdict=verdict)
        return found


def _non_finite(grads: list[Tensor]) -> Tensor:
    return _C.measure(grads)[-1, 2].to(torch.float32)


def _plain_gradients(optimizer: torch.optim.Optimizer) -> dict[torch.device, list[Tensor]] | None:
    """The gradients by device; None if one (sparse, a DTensor, float64) is torch's to do."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            dense = grad.layout == torch.strided and (grad.is_contiguous() or _channels_last(grad))
            if type(grad) is not Tensor or grad.dtype not in NATIVE or not dense:
                return None
            by_device.setdefault(grad.device, []).append(grad)
    return by_device


def _channels_last(tensor: Tensor) -> bool:
    return (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)) or (
        tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d)
    )
