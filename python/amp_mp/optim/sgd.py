"""SGD with momentum."""

from typing import Any, Unpack

from torch import Tensor

from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.options import Options
from amp_mp.optim.rule import Group, Rule, State, has_momentum, numbers

NUMBERS = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
BUFFER = (State("momentum_buffer", "moment"),)


def _numbers(group: Group) -> dict[str, Any]:
    found = numbers(*NUMBERS)(group)
    if not group["momentum"]:
        found["dampening"] = 0.0  # a group without momentum in an optimizer that has some
    return found


class SGD(FusedOptimizer):
    """Sutskever et al., "On the importance of initialization and momentum" (2013), as in torch.

        g = g + weight_decay w
        b = g at a parameter's first step, else momentum b + (1 - dampening) g
        w = w - lr (g + momentum b if nesterov else b)

    momentum_form="scaled" is Caffe's older form, with the learning rate inside the buffer:

        b = momentum b + lr g
        w = w - (lr g + momentum b if nesterov else b)

    Both are equal where lr is constant and nothing is rounded: a buffer of the scaled form is lr
    times the other. In float16 lr g may vanish where g does not: see docs/fp16_momentum.md.

    Args:
        params: parameters or param_groups.
        lr: learning rate, a number or a tensor of one element. Default 1e-3.
        momentum: decay rate of b. Default 0: no b.
        dampening: reduces what is added to b. Default 0.
        weight_decay: what is added to the gradient, times the weight. Default 0.
        nesterov: Nesterov's momentum; needs momentum > 0 and dampening = 0. Default False.
        momentum_form: "unscaled" or "scaled", which has no dampening. Default "unscaled".
        momentum_buffer: how b is stored; see memory below.

    State: step, momentum_buffer (b) if a group has momentum, and master or remainder for
    low-precision parameters.
    """

    rules = (
        Rule("plain_sgd_", _numbers),
        Rule("sgd_", _numbers, BUFFER),
        Rule("scaled_sgd_", _numbers, BUFFER),
    )

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        momentum_form: str = "unscaled",
        **options: Unpack[Options],
    ) -> None:
        if momentum_form not in ("unscaled", "scaled"):
            raise ValueError(
                f'momentum_form must be "unscaled" or "scaled", found {momentum_form!r}'
            )
        if momentum_form == "scaled" and dampening != 0:
            raise ValueError(
                f'momentum_form="scaled" has no dampening, found dampening={dampening!r}'
            )
        self.momentum_form = momentum_form
        values = (lr, momentum, dampening, weight_decay, nesterov)
        super().__init__(params, dict(zip(NUMBERS, values, strict=True)), options)

    def rule(self) -> Rule:
        """With a momentum buffer if any group has momentum, in the form of momentum_form."""
        plain, unscaled, scaled = self.rules
        if not has_momentum(self.param_groups):
            return plain
        return unscaled if self.momentum_form == "unscaled" else scaled

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "momentum_form": self.momentum_form}
