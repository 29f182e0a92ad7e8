"""Lion."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.options import Options, check_ranges
from amp_mp.optim.rule import Rule, State, numbers

LION = Rule("lion_", numbers("lr", "betas", "weight_decay"), (State("exp_avg", "moment"),))


class Lion(FusedOptimizer):
    """Chen et al., "Symbolic discovery of optimization algorithms" (2023), algorithm 2.

        c = beta1 m + (1 - beta1) g
        m = beta2 m + (1 - beta2) g
        w = (1 - lr weight_decay) w - lr sign(c)

    Every element moves by lr: take a tenth to a third of AdamW's, and that much more weight decay.

    Args:
        params, lr, weight_decay: as torch.optim.AdamW.
        betas: of the direction and of the average.
        exp_avg and what all fused optimizers take: see FusedOptimizer.

    State: step, exp_avg, and master or remainder for low-precision parameters.

    Raises ValueError for an argument out of range.
    """

    rules = (LION,)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        exp_avg: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        """See the class."""
        check_ranges(lr, betas, 0.0, weight_decay)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, {"exp_avg": exp_avg}, options)
