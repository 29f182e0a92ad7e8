"""RMSprop."""

from typing import Any, Unpack

from torch import Tensor

from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.options import Options
from amp_mp.optim.rule import Rule, State, has_momentum, numbers, same_in_all_groups

BUFFER, SQUARE = State("momentum_buffer", "moment"), State("square_avg", "square")
NUMBERS = numbers("lr", "eps", "weight_decay", "momentum", alpha="beta2")


class RMSprop(FusedOptimizer):
    """Tieleman & Hinton, lecture 6.5 of "Neural networks for machine learning" (2012), as in torch.

        g = g + weight_decay w
        v = alpha v + (1 - alpha) g^2
        u = g / (sqrt(v) + eps), with momentum b = momentum b + u instead
        w = w - lr u

    Args:
        params: parameters or param_groups.
        lr: learning rate, a number or a tensor of one element. Default 1e-2.
        alpha: decay rate of v. Default 0.99.
        eps: added to the denominator. Default 1e-8.
        weight_decay: what is added to the gradient, times the weight. Default 0.
        momentum: decay rate of b. Default 0: no b.
        centered: subtract the square of the averaged gradient from v (Graves 2013). The difference
            needs float32 states. Default False.
        square_avg, momentum_buffer: how v and b are stored; see memory below.

    State: step, square_avg (v), momentum_buffer (b) if a group has momentum or with centered,
    grad_avg with centered, and master or remainder for low-precision parameters.
    """

    rules = (
        Rule("plain_rmsprop_", NUMBERS, (SQUARE,)),
        Rule("rmsprop_", NUMBERS, (BUFFER, SQUARE)),
        Rule("centered_rmsprop_", NUMBERS, (BUFFER, SQUARE, State("grad_avg", "exact"))),
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
        **options: Unpack[Options],
    ) -> None:
        square = options.get("square_avg")
        if centered and square not in (None, "float32"):
            raise ValueError(f'square_avg must be "float32" if centered, found {square!r}')
        if centered:
            options["square_avg"] = "float32"
        defaults = {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "momentum": momentum, "centered": centered}, options)

    def rule(self) -> Rule:
        """Centered or not, which must be the same in all groups; with momentum if any group has."""
        plain, with_momentum, centered = self.rules
        if same_in_all_groups(self.param_groups, "centered"):
            return centered
        return with_momentum if has_momentum(self.param_groups) else plain
