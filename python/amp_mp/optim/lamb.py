"""LAMB."""

from typing import Any, Unpack

from torch import Tensor

from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.options import Options
from amp_mp.optim.rule import Rule, State, numbers


class LAMB(FusedOptimizer):
    """You et al., "Large batch optimization for deep learning" (2020), algorithm 2.

        m, v: as Adam
        r = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay w
        w = w - lr |w| / |r| r

    |w| / |r| is the ratio of a tensor's 2-norms, and 1 where one of them is 0.

    Args:
        params: parameters or param_groups.
        lr: learning rate, a number or a tensor of one element. Default 1e-3.
        betas: decay rates of m and v. Default (0.9, 0.999).
        eps: added to the denominator. Default 1e-6.
        weight_decay: what is added to the update, times the weight. Default 0.01.
        always_adapt: False leaves out the ratio in groups without weight decay, as Apex does.
            Default True.
        exp_avg, exp_avg_sq: how m and v are stored; see memory below.

    State: as AdamW's.
    """

    rules = (
        Rule(
            "lamb_",
            numbers("lr", "betas", "eps", "weight_decay", "always_adapt"),
            (State("exp_avg", "moment"), State("exp_avg_sq", "square")),
            needs_norms=True,
        ),
    )

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        always_adapt: bool = True,
        **options: Unpack[Options],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "always_adapt": always_adapt}, options)
