"""LARS and LARC: SGD with a learning rate for each layer."""

from typing import Any, Unpack

from torch import Tensor

from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.options import Options
from amp_mp.optim.rule import Rule, State, numbers

NUMBERS = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "clip", "eps")


class LARS(FusedOptimizer):
    """You, Gitman & Ginsburg, "Large batch training of convolutional networks" (2017).

    SGD with momentum on gradients that are scaled tensor by tensor, as Apex's LARC(SGD(...)):

        ratio = trust_coefficient |w| / (|g| + weight_decay |w| + eps)
        g = ratio (g + weight_decay w); unchanged where |w| or |g| is 0
        b = g at a parameter's first step, else momentum b + (1 - dampening) g
        w = w - lr (g + momentum b if nesterov else b)

    Args:
        params: parameters or param_groups.
        lr: learning rate, a number or a tensor of one element. Default 1e-3.
        momentum, dampening, nesterov: as torch.optim.SGD. Default 0.9, 0, False.
        weight_decay: what is added to the gradient, times the weight. Default 0.
        trust_coefficient: factor of the ratio. Default 0.02.
        clip: True is LARC: the ratio is min(ratio / lr, 1), so that no layer's rate exceeds lr.
            Default False.
        eps: added to the ratio's denominator. Default 1e-8.
        momentum_buffer: how b is stored; see memory below.

    State: step, momentum_buffer (b), and master or remainder for low-precision parameters.
    """

    rules = (
        Rule(
            "lars_",
            numbers(*NUMBERS, trust_coefficient="trust"),
            (State("momentum_buffer", "moment"),),
            needs_norms=True,
        ),
    )

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
        **options: Unpack[Options],
    ) -> None:
        values = (lr, momentum, dampening, weight_decay, nesterov, clip, eps)
        defaults = dict(zip(NUMBERS, values, strict=True))
        super().__init__(params, {**defaults, "trust_coefficient": trust_coefficient}, options)
