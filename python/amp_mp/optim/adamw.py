"""AdamW: Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from torch import Tensor

from amp_mp import _C
from amp_mp.optim.base import FusedOptimizer, Options, check_ranges


class AdamW(FusedOptimizer):
    """Loshchilov & Hutter, "Decoupled weight decay regularization" (2019), as torch.optim.AdamW.

        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        w = (1 - lr weight_decay) w - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

    With amsgrad the largest v so far takes v's place in the last line (Reddi et al. 2018).

    Arguments are torch's, how the moments are stored, `exp_avg`, `exp_avg_sq`, and what all fused
    optimizers take: see FusedOptimizer.
    State: step, beta_powers, exp_avg, exp_avg_sq, max_exp_avg_sq with amsgrad, and master or
    remainder for low-precision parameters. A late parameter has its own step count. betas may
    change between steps: the bias corrections use the product of those that were in force.

    Raises ValueError for an argument out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
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
            "amsgrad": amsgrad,
        }
        formats = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "max_exp_avg_sq": None}
        super().__init__(params, defaults, formats, **options)

    def _amsgrad(self) -> bool:
        kinds = {bool(group["amsgrad"]) for group in self.param_groups}
        if len(kinds) > 1:
            raise ValueError("amsgrad must be the same in all param_groups, found both")
        return kinds == {True}

    def _states(self) -> tuple[str, ...]:
        more = ("max_exp_avg_sq",) if self._amsgrad() else ()
        return ("exp_avg", "exp_avg_sq", *more)

    def _numbers(self, group: dict[str, Any]) -> dict[str, Any]:
        return {
            "lr": group["lr"],
            "beta1": group["betas"][0],
            "beta2": group["betas"][1],
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
        }

    def _operator(self) -> Callable[..., None]:
        return _C.amsgrad_adamw_ if self._amsgrad() else _C.adamw_
