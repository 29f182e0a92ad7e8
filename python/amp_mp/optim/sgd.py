"""SGD with momentum."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.options import Options, check_ranges
from amp_mp.optim.rule import Group, Rule, State, has_momentum, numbers


def _numbers(group: Group) -> dict[str, Any]:
    found = numbers("lr", "momentum", "dampening", "weight_decay", "nesterov")(group)
    if not group["momentum"]:
        found["dampening"] = 0.0  # a group without momentum in an optimizer that has some
    return found


BUFFER = (State("momentum_buffer", "moment"),)


class SGD(FusedOptimizer):
    """Sutskever et al., "On the importance of initialization and momentum" (2013), as in torch.

        g = g + weight_decay w
        b = g at a parameter's first step, else momentum b + (1 - dampening) g
        w = w - lr (g + momentum b if nesterov else b)

    momentum_form="scaled" is Caffe's older form, with the learning rate inside the buffer:

        b = momentum b + lr g
        w = w - (lr g + momentum b if nesterov else b)

    Equal where lr is constant and nothing is rounded. In float16 lr g may vanish where g does not:
    see docs/fp16_momentum.md. A buffer of one form is lr times one of the other.

    Arguments are torch's, how the buffer is stored, `momentum_buffer`, and what all fused
    optimizers take: see FusedOptimizer.
    State: step, momentum_buffer unless no group has momentum, and master or remainder for
    low-precision parameters.

    Raises ValueError for an argument out of range.
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
        momentum_buffer: str | None = None,
        momentum_form: str = "unscaled",
        **options: Unpack[Options],
    ) -> None:
        """See the class."""
        if momentum_form not in ("unscaled", "scaled"):
            raise ValueError(
                f'momentum_form must be "unscaled" or "scaled", found {momentum_form!r}'
            )
        if momentum_form == "scaled" and dampening != 0:
            raise ValueError(
                f'momentum_form="scaled" has no dampening, found dampening={dampening!r}'
            )
        self.momentum_form = momentum_form
        check_ranges(lr, (), 0.0, weight_decay)
        if not momentum >= 0:
            raise ValueError(f"momentum must not be negative, found {momentum!r}")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                "nesterov needs momentum > 0 and dampening = 0, "
                f"found {momentum!r} and {dampening!r}"
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, {"momentum_buffer": momentum_buffer}, options)

    def rule(self) -> Rule:
        """With a momentum buffer if any group has momentum, in the form of momentum_form."""
        plain, unscaled, scaled = self.rules
        if not has_momentum(self.param_groups):
            return plain
        return unscaled if self.momentum_form == "unscaled" else scaled

    def __getstate__(self) -> dict[str, Any]:
        """As the base's, and the form of the momentum."""
        return {**super().__getstate__(), "momentum_form": self.momentum_form}
