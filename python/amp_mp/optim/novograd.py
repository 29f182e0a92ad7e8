"""NovoGrad."""

from typing import Any, Unpack

from torch import Tensor

from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.options import Options
from amp_mp.optim.rule import Group, Rule, State, numbers


def _numbers(group: Group) -> dict[str, Any]:
    found = numbers("lr", "betas", "eps", "weight_decay")(group)
    found["dampening"] = found["beta1"] if group["grad_averaging"] else 0.0
    return found


class NovoGrad(FusedOptimizer):
    """Ginsburg et al., "Stochastic gradient methods with layer-wise adaptive moments" (2019).

        v = |g|^2 at a tensor's first step, else beta2 v + (1 - beta2) |g|^2
        m = beta1 m + g / (sqrt(v) + eps) + weight_decay w
        w = w - lr m

    Args:
        params: parameters or param_groups.
        lr: learning rate, a number or a tensor of one element. Default 1e-2.
        betas: decay rates of m and v. Default (0.95, 0.98), the paper's.
        eps: added to the denominator. Default 1e-8.
        weight_decay: what is added to m, times the weight. Default 0.
        grad_averaging: multiply what is added to m by 1 - beta1, as NVIDIA's versions do. Default
            False.
        exp_avg: how m is stored; see memory below.

    State: step, layer (v, one number per tensor), exp_avg (m), and master or remainder for
    low-precision parameters.
    """

    rules = (Rule("novograd_", _numbers, (State("exp_avg", "moment"),), needs_norms=True),)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float] = (0.95, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        grad_averaging: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "grad_averaging": grad_averaging}, options)
