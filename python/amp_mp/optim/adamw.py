"""AdamW: Adam with decoupled weight decay."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.options import Options, check_ranges
from amp_mp.optim.rule import Rule, State, numbers, same_in_all_groups

MOMENTS = (State("exp_avg", "moment"), State("exp_avg_sq", "square"))
AMSGRAD_STATES = (*MOMENTS, State("max_exp_avg_sq", "exact"))
NUMBERS = numbers("lr", "betas", "eps", "weight_decay")


class AdamW(FusedOptimizer):
    """Loshchilov & Hutter, "Decoupled weight decay regularization" (2019), as torch.optim.AdamW.

        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        w = (1 - lr weight_decay) w - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

    With amsgrad the largest v so far takes v's place in the last line (Reddi et al. 2018).

    Arguments are torch's, how the moments are stored, `exp_avg`, `exp_avg_sq`, and what all fused
    optimizers take: see FusedOptimizer.
    State: step, beta_powers, exp_avg, exp_avg_sq, max_exp_avg_sq with amsgrad, and master or
    remainder for low-precision parameters. A late parameter has its own step count. betas may
    change between steps: the bias corrections use the product of those that were in force.

    Raises ValueError for an argument out of range.
    """

    rules = (Rule("adamw_", NUMBERS, MOMENTS), Rule("amsgrad_adamw_", NUMBERS, AMSGRAD_STATES))

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
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
            "amsgrad": amsgrad,
        }
        formats = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        super().__init__(params, defaults, formats, options)

    def rule(self) -> Rule:
        """With or without amsgrad, which must be the same in all groups (ValueError)."""
        return self.rules[same_in_all_groups(self.param_groups, "amsgrad")]
