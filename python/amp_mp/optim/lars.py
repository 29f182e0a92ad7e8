"""LARS and LARC: SGD with a rate for each layer."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.options import Options, check_ranges
from amp_mp.optim.rule import Rule, State, numbers

LARS_RULE = Rule(
    "lars_",
    numbers(
        *("lr", "momentum", "dampening", "weight_decay", "nesterov", "clip", "eps"),
        trust_coefficient="trust",
    ),
    (State("momentum_buffer", "moment"),),
    needs_norms=True,
)


class LARS(FusedOptimizer):
    """You, Gitman & Ginsburg, "Large batch training of convolutional networks" (2017).

    SGD with momentum, on gradients that are scaled tensor by tensor, in the form of Apex's
    LARC(SGD(...)):

        ratio = trust_coefficient |w| / (|g| + weight_decay |w| + eps)
        g = ratio (g + weight_decay w); g as it is where |w| or |g| is 0
        b = g at a parameter's first step, else momentum b + (1 - dampening) g
        w = w - lr (g + momentum b if nesterov else b)

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov: as torch.optim.SGD.
        trust_coefficient: of the ratio.
        clip: True is LARC: the ratio is min(ratio / lr, 1), so a layer's rate is lr at most.
        eps: added to the denominator.
        momentum_buffer and what all fused optimizers take: see FusedOptimizer.

    State: step, momentum_buffer, and master or remainder for low-precision parameters.

    Raises ValueError for an argument out of range.
    """

    rules = (LARS_RULE,)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        trust_coefficient: float = 0.02,
        clip: bool = False,
        eps: float = 1e-8,
        momentum_buffer: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        """See the class."""
        check_ranges(lr, (), eps, weight_decay)
        for name, value in (("momentum", momentum), ("trust_coefficient", trust_coefficient)):
            if not value >= 0:
                raise ValueError(f"{name} must not be negative, found {value!r}")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                "nesterov needs momentum > 0 and dampening = 0, "
                f"found {momentum!r} and {dampening!r}"
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "trust_coefficient": trust_coefficient,
            "clip": clip,
            "eps": eps,
        }
        super().__init__(params, defaults, {"momentum_buffer": momentum_buffer}, options)
