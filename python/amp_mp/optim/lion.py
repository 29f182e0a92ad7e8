"""Lion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from amp_mp import _C
from amp_mp.optim.base import FusedOptimizer, check_ranges


class Lion(FusedOptimizer):
    """Chen et al., "Symbolic discovery of optimization algorithms" (2023), algorithm 2.

        c = beta1 m + (1 - beta1) g
        m = beta2 m + (1 - beta2) g
        w = (1 - lr weight_decay) w - lr sign(c)

    Every element moves by lr: take a tenth to a third of AdamW's, and that much more weight decay.

    Args:
        params, lr, weight_decay, maximize: as torch.optim.AdamW.
        betas: of the direction and of the average.
        max_grad_norm, check_overflow, amp_scaling, master, exp_avg: see FusedOptimizer.

    State: step, beta_powers (unused), exp_avg, and master for low-precision parameters.

    Raises ValueError for an argument out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        check_overflow: bool = False,
        amp_scaling: bool = True,
        master: str = "float32",
        exp_avg: str = "float32",
    ) -> None:
        """See the class."""
        check_ranges(lr, betas, 0.0, weight_decay)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(
            params,
            defaults,
            max_grad_norm=max_grad_norm,
            check_overflow=check_overflow,
            amp_scaling=amp_scaling,
            master=master,
            formats={"exp_avg": exp_avg},
        )

    def _states(self) -> tuple[str, ...]:
        return ("exp_avg",)

    def _hyper(self, group: dict[str, Any]) -> _C.Hyper:
        return _C.Hyper(
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
        )

    def _operator(self) -> Callable[..., None]:
        return _C.lion_
