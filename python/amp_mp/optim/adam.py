"""Adam: the weight decay is added to the gradient."""

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

    Args:
        weight_decay: what is added to the gradient, times the weight. Default 0. (For torch's
            decoupled_weight_decay=True use AdamW.)
        params, lr, betas, eps, amsgrad, exp_avg, exp_avg_sq: see AdamW.

    State: as AdamW's.
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
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
