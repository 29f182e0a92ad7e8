"""Adadelta; its rule is csrc/core/rules/adadelta.h."""

from typing import Any, Unpack

from torch import Tensor

from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.options import Options
from amp_mp.optim.rule import Rule, State, numbers

NUMBERS = numbers("lr", "eps", "weight_decay", rho="beta2")
STATES = (State("square_avg", "square"), State("acc_delta", "square"))


class Adadelta(FusedOptimizer):
    """Zeiler, "ADADELTA: an adaptive learning rate method" (2012), as torch.optim.Adadelta.

        g = g + weight_decay w
        v = rho v + (1 - rho) g^2
        d = sqrt(u + eps) / sqrt(v + eps) * g
        u = rho u + (1 - rho) d^2
        w = w - lr d

    NVCaffe's AdaDelta is the same with other numbers: docs/migration.md.

    Args:
        lr: what the update d is multiplied by. Default 1.
        rho: decay rate of v and u, in [0, 1]. Default 0.9.
        eps: added to v and u under the roots. Default 1e-6.
        weight_decay: what is added to the gradient, times the weight. Default 0.

    State: square_avg (v) and acc_delta (u).
    """

    _rules = (Rule("adadelta_", NUMBERS, STATES),)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        defaults = {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, options)
