"""NovoGrad."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.options import Options, check_ranges
from amp_mp.optim.rule import Group, Rule, State, numbers


def _numbers(group: Group) -> dict[str, Any]:
    found = numbers("lr", "betas", "eps", "weight_decay")(group)
    found["dampening"] = found["beta1"] if group["grad_averaging"] else 0.0
    return found


NOVOGRAD = Rule("novograd_", _numbers, (State("exp_avg", "moment"),), needs_norms=True)


class NovoGrad(FusedOptimizer):
    """Ginsburg et al., "Stochastic gradient methods with layer-wise adaptive moments" (2019).

        v = |g|^2 at a tensor's first step, else beta2 v + (1 - beta2) |g|^2
        m = beta1 m + g / (sqrt(v) + eps) + weight_decay w
        w = w - lr m

    Args:
        params, lr, eps, weight_decay: as torch.optim.AdamW.
        betas: the paper's defaults.
        grad_averaging: True multiplies what joins m by 1 - beta1, as NVIDIA's versions do.
        exp_avg and what all fused optimizers take: see FusedOptimizer.

    State: step, layer (v, a number a tensor), exp_avg, and master or remainder for low-precision
    parameters. Raises ValueError for an argument out of range.
    """

    rules = (NOVOGRAD,)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float] = (0.95, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        grad_averaging: bool = False,
        exp_avg: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        """See the class."""
        check_ranges(lr, betas, eps, weight_decay)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
        }
        super().__init__(params, defaults, {"exp_avg": exp_avg}, options)
