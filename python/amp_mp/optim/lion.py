"""Lion."""

from typing import Any, Unpack

from torch import Tensor

from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.options import Options
from amp_mp.optim.rule import Rule, State, numbers


class Lion(FusedOptimizer):
    """Chen et al., "Symbolic discovery of optimization algorithms" (2023), algorithm 2.

        c = beta1 m + (1 - beta1) g
        m = beta2 m + (1 - beta2) g
        w = (1 - lr weight_decay) w - lr sign(c)

    Every element moves by lr: use a third to a tenth of AdamW's lr, and 3 to 10 times its decay.

    Args:
        params: parameters or param_groups.
        lr: learning rate, a number or a tensor of one element. Default 1e-4.
        betas: decay rates of the direction c and of the average m. Default (0.9, 0.99).
        weight_decay: the weights shrink by lr times this at each step. Default 0.
        exp_avg: how m is stored; see memory below.

    State: step, exp_avg (m), and master or remainder for low-precision parameters.
    """

    rules = (Rule("lion_", numbers("lr", "betas", "weight_decay"), (State("exp_avg", "moment"),)),)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, options)
