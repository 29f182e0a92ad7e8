"""Adagrad."""

from typing import Any, Unpack

from torch import Tensor

from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.options import Options
from amp_mp.optim.rule import Rule, State, numbers


class Adagrad(FusedOptimizer):
    """Duchi, Hazan & Singer, "Adaptive subgradient methods" (2011), as torch.optim.Adagrad.

        g = g + weight_decay w
        s = s + g^2
        w = w - lr / (1 + (t - 1) lr_decay) * g / (sqrt(s) + eps)

    Args:
        params: parameters or param_groups.
        lr: learning rate, a number or a tensor of one element. Default 1e-2.
        lr_decay: how fast the learning rate falls with the steps. Default 0.
        weight_decay: what is added to the gradient, times the weight. Default 0.
        initial_accumulator_value: what s starts from. Default 0.
        eps: added to the denominator. Default 1e-10.
        sum: how s is stored; see memory below.

    State: step, sum (s), and master or remainder for low-precision parameters.
    """

    rules = (
        Rule(
            "adagrad_",
            numbers("lr", "lr_decay", "eps", "weight_decay"),
            (State("sum", "square", initial="initial_accumulator_value"),),
        ),
    )

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            **{"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps},
            "initial_accumulator_value": initial_accumulator_value,
        }
        super().__init__(params, defaults, options)
