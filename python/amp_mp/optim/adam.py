"""Adam: the decay joins the gradient."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from amp_mp.optim.adamw import AMSGRAD_STATES, MOMENTS, NUMBERS, AdamW
from amp_mp.optim.options import Options
from amp_mp.optim.rule import Rule


class Adam(AdamW):
    """Kingma & Ba, "Adam: a method for stochastic optimization" (2015), as torch.optim.Adam.

        g = g + weight_decay w
        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        w = w - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

    Everything else as AdamW, which is also what decoupled_weight_decay=True gives in torch;
    weight_decay is 0 by default.
    """

    rules = (Rule("adam_", NUMBERS, MOMENTS), Rule("amsgrad_adam_", NUMBERS, AMSGRAD_STATES))

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        exp_avg: str | None = None,
        exp_avg_sq: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        """See the class."""
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            **options,
        )
