"""AdamW: Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from amp_mp import _C
from amp_mp.optim.base import FusedOptimizer, check_ranges


class AdamW(FusedOptimizer):
    """Loshchilov & Hutter, "Decoupled weight decay regularization" (2019), as torch.optim.AdamW.

        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        w = (1 - lr weight_decay) w - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

    Arguments are torch's; `max_grad_norm`, `check_overflow`, `amp_scaling`, and how masters and
    states are stored, `master`, `exp_avg`, `exp_avg_sq`: see FusedOptimizer.
    State: step, beta_powers, exp_avg, exp_avg_sq, and master for low-precision parameters. A late
    parameter has its own step count. betas may change between steps: the bias corrections use the
    product of those that were in force.

    Raises ValueError for an argument out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        check_overflow: bool = False,
        amp_scaling: bool = True,
        master: str = "float32",
        exp_avg: str = "float32",
        exp_avg_sq: str = "float32",
    ) -> None:
        """See the class."""
        check_ranges(lr, betas, eps, weight_decay)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(
            params,
            defaults,
            max_grad_norm=max_grad_norm,
            check_overflow=check_overflow,
            amp_scaling=amp_scaling,
            master=master,
            formats={"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq},
        )

    def _states(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def _hyper(self, group: dict[str, Any]) -> _C.Hyper:
        return _C.Hyper(
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
        )

    def _operator(self) -> Callable[..., None]:
        return _C.adamw_
