"""LAMB."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.options import Options, check_ranges
from amp_mp.optim.rule import Rule, State, numbers

LAMB_RULE = Rule(
    "lamb_",
    numbers("lr", "betas", "eps", "weight_decay", "always_adapt"),
    (State("exp_avg", "moment"), State("exp_avg_sq", "square")),
    needs_norms=True,
)


class LAMB(FusedOptimizer):
    """You et al., "Large batch optimization for deep learning" (2020), algorithm 2.

        m, v: as Adam
        r = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay w
        w = w - lr |w| / |r| r, the ratio of a tensor's 2-norms, 1 where one of them is 0

    Args:
        params, lr, betas, eps, weight_decay: as torch.optim.AdamW, with the paper's defaults.
        always_adapt: False leaves the ratio out for groups without weight decay, as Apex does.
        exp_avg, exp_avg_sq and what all fused optimizers take: see FusedOptimizer.

    State as AdamW's. Raises ValueError for an argument out of range.
    """

    rules = (LAMB_RULE,)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        always_adapt: bool = True,
        exp_avg: str | None = None,
        exp_avg_sq: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        """See the class."""
        check_ranges(lr, betas, eps, weight_decay)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "always_adapt": always_adapt,
        }
        formats = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        super().__init__(params, defaults, formats, options)
