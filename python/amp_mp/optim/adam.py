"""Adam: the decay joins the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from amp_mp import _C
from amp_mp.optim.adamw import AdamW


class Adam(AdamW):
    """Kingma & Ba, "Adam: a method for stochastic optimization" (2015), as torch.optim.Adam.

        g = g + weight_decay w
        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        w = w - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

    Everything else as AdamW; weight_decay is 0 by default.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
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
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            maximize=maximize,
            max_grad_norm=max_grad_norm,
            check_overflow=check_overflow,
            amp_scaling=amp_scaling,
            master=master,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
        )

    def _operator(self) -> Callable[..., None]:
        return _C.adam_
