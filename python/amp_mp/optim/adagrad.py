"""Adagrad."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.options import Options, check_ranges
from amp_mp.optim.rule import Rule, State, numbers

ADAGRAD = Rule(
    "adagrad_",
    numbers("lr", "lr_decay", "eps", "weight_decay"),
    (State("sum", "square", initial="initial_accumulator_value"),),
)


class Adagrad(FusedOptimizer):
    """Duchi, Hazan & Singer, "Adaptive subgradient methods" (2011), as torch.optim.Adagrad.

        g = g + weight_decay w
        s = s + g^2, from initial_accumulator_value on
        w = w - lr / (1 + (t - 1) lr_decay) * g / (sqrt(s) + eps)

    Arguments are torch's, how the sum is stored, `sum`, and what all fused optimizers take: see
    FusedOptimizer. State: step, sum, and master or remainder for low-precision parameters.

    Raises ValueError for an argument out of range.
    """

    rules = (ADAGRAD,)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        sum: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        """See the class."""
        check_ranges(lr, (), eps, weight_decay)
        for name, value in (
            ("lr_decay", lr_decay),
            ("initial_accumulator_value", initial_accumulator_value),
        ):
            if not value >= 0:
                raise ValueError(f"{name} must not be negative, found {value!r}")
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        super().__init__(params, defaults, {"sum": sum}, options)
