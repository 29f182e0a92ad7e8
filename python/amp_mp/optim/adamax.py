"""Adamax: Adam with the largest gradient in place of the second moment."""

from typing import Any, Unpack

from torch import Tensor

from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.options import Options
from amp_mp.optim.rule import Rule, State, numbers


class Adamax(FusedOptimizer):
    """Kingma & Ba, "Adam" (2015), algorithm 2, as torch.optim.Adamax.

        g = g + weight_decay w
        m = beta1 m + (1 - beta1) g
        u = max(beta2 u, |g| + eps)
        w = w - lr / (1 - beta1^t) * m / u

    Args:
        params: parameters or param_groups.
        lr: learning rate, a number or a tensor of one element. Default 2e-3.
        betas: decay rates of m and u. Default (0.9, 0.999).
        eps: added to |g|. Default 1e-8.
        weight_decay: what is added to the gradient, times the weight. Default 0.
        exp_avg: how m is stored; see memory below. u is float32 in every preset.

    State: step, beta_powers, exp_avg (m), exp_inf (u), and master or remainder for low-precision
    parameters.
    """

    rules = (
        Rule(
            "adamax_",
            numbers("lr", "betas", "eps", "weight_decay"),
            (State("exp_avg", "moment"), State("exp_inf", "exact")),
        ),
    )

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, options)
