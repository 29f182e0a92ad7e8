"""LAMB."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from torch import Tensor

from amp_mp import _C
from amp_mp.optim.base import FusedOptimizer, Options, check_ranges


class LAMB(FusedOptimizer):
    """You et al., "Large batch optimization for deep learning" (2020), algorithm 2.

        m, v: as Adam
        r = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay w
        w = w - lr |w| / |r| r, the ratio of a tensor's 2-norms, 1 where one of them is 0

    Args:
        params, lr, betas, eps, weight_decay: as torch.optim.AdamW, with the paper's defaults.
        always_adapt: False leaves the ratio out for groups without weight decay, as Apex does.
        exp_avg, exp_avg_sq and what all fused optimizers take: see FusedOptimizer.

    State as AdamW's. Raises ValueError for an argument out of range.
    """

    _needs_norms = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        always_adapt: bool = True,
        exp_avg: str | None = None,
        exp_avg_sq: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        """See the class."""
        check_ranges(lr, betas, eps, weight_decay)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "always_adapt": always_adapt,
        }
        formats = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        super().__init__(params, defaults, formats, **options)

    def _states(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def _numbers(self, group: dict[str, Any]) -> dict[str, Any]:
        return {
            "lr": group["lr"],
            "beta1": group["betas"][0],
            "beta2": group["betas"][1],
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "always_adapt": group["always_adapt"],
        }

    def _operator(self) -> Callable[..., None]:
        return _C.lamb_
