"""RMSprop."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.options import Options, check_ranges
from amp_mp.optim.rule import Rule, State, has_momentum, numbers, same_in_all_groups

PLAIN, BUFFER = State("square_avg", "square"), State("momentum_buffer", "moment")
NUMBERS = numbers("lr", "eps", "weight_decay", "momentum", alpha="beta2")


class RMSprop(FusedOptimizer):
    """Tieleman & Hinton, lecture 6.5 of "Neural networks for machine learning" (2012), as in torch.

        g = g + weight_decay w
        v = alpha v + (1 - alpha) g^2
        u = g / (sqrt(v) + eps), with momentum b = momentum b + u in its place
        w = w - lr u

    centered=True subtracts the square of the averaged gradient from v (Graves 2013).

    Arguments are torch's, how states are stored, `square_avg`, `momentum_buffer`, and what all
    fused optimizers take: see FusedOptimizer. A centered v is a difference, so it is float32.
    State: step, square_avg, momentum_buffer where a group has momentum or all are centered,
    grad_avg with centered, and master or remainder for low-precision parameters.

    Raises ValueError for an argument out of range.
    """

    rules = (
        Rule("plain_rmsprop_", NUMBERS, (PLAIN,)),
        Rule("rmsprop_", NUMBERS, (BUFFER, PLAIN)),
        Rule("centered_rmsprop_", NUMBERS, (BUFFER, PLAIN, State("grad_avg", "exact"))),
    )

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        square_avg: str | None = None,
        momentum_buffer: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        """See the class."""
        check_ranges(lr, (), eps, weight_decay)
        if not 0 <= alpha < 1:
            raise ValueError(f"alpha must be in [0, 1), found {alpha!r}")
        if not momentum >= 0:
            raise ValueError(f"momentum must not be negative, found {momentum!r}")
        if centered and square_avg not in (None, "float32"):
            raise ValueError(f'square_avg must be "float32" if centered, found {square_avg!r}')
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "centered": centered,
        }
        formats = {
            "square_avg": "float32" if centered else square_avg,
            "momentum_buffer": momentum_buffer,
        }
        super().__init__(params, defaults, formats, options)

    def rule(self) -> Rule:
        """Centered or not, which must be the same in all groups; with momentum if any group has."""
        plain, with_momentum, centered = self.rules
        if same_in_all_groups(self.param_groups, "centered"):
            return centered
        return with_momentum if has_momentum(self.param_groups) else plain
