"""AdamW on float32 masters in plain torch operations: what amp_mp's "exact" is compared with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from gpt_trainer import MAX_GRAD_NORM
from torch import Tensor

from amp_mp import _C


class ReferenceAdamW(torch.optim.Optimizer):
    """AdamW on float32 masters in torch's elementwise operations; "exact" has to give its bits.

    There are no fused operations (addcmul, lerp), because they round once where the formula rounds
    twice. Constants are doubles and are rounded when they are combined with a tensor. `masters` has
    the float32 values of the low-precision parameters.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        masters: Mapping[Any, Tensor],
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        defaults = {"lr": 0.0, "betas": betas, "eps": 1e-8, "weight_decay": 0.0}
        super().__init__(groups, defaults)
        self.powers = [1.0, 1.0]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            if parameter.dtype != torch.float32:
                state["master"] = masters[parameter]
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """One update of every parameter; every parameter must have a gradient."""
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        # The order of summation decides the norm's last bits, so it comes from the same function.
        norm = math.sqrt(_C.measure(gradients)[-1, 0].item())
        multiplier = min(1.0, MAX_GRAD_NORM / (norm + 1e-6))
        self.powers = [p * b for p, b in zip(self.powers, self.defaults["betas"], strict=True)]
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            decay, step_size = 1 - lr * group["weight_decay"], lr / (1 - self.powers[0])
            root = 1 / math.sqrt(1 - self.powers[1])
            for parameter in group["params"]:
                state = self.state[parameter]
                w, m, v = state.get("master", parameter), state["exp_avg"], state["exp_avg_sq"]
                g = parameter.grad.float() * multiplier
                m.copy_(m * beta1 + g * (1 - beta1))
                v.copy_(v * beta2 + g * (1 - beta2) * g)
                # torch's float32 root (MKL's) is not correctly rounded for one number in five.
                deviation = v.double().sqrt().float() * root + group["eps"]
                w.copy_(w * decay - m / deviation * step_size)
                if w is not parameter:
                    parameter.copy_(away_from_zero(w))


def away_from_zero(x: Tensor) -> Tensor:
    """Finite float32 rounded to the nearest bfloat16, ties to the larger magnitude."""
    return ((x.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
