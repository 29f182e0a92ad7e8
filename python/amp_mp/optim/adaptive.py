"""Adagrad, RMSprop, Adadelta, Adamax and Lion; rules: csrc/core/rules/adaptive.h, rmsprop.h."""

from typing import Any, Unpack

from torch import Tensor

from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.options import Options
from amp_mp.optim.rule import Group, Rule, is_on


class Adagrad(FusedOptimizer):
    """Duchi, Hazan & Singer, "Adaptive subgradient methods" (2011), as torch.optim.Adagrad.

        g = g + weight_decay w
        s = s + g^2
        w = w - lr / (1 + (t - 1) lr_decay) * g / (sqrt(s) + eps)

    Args:
        lr: learning rate. Default 1e-2.
        lr_decay: how fast the learning rate falls with the steps. Default 0.
        weight_decay: what is added to the gradient, times the weight. Default 0.
        initial_accumulator_value: what s starts from. Default 0.
        eps: added to the denominator. Default 1e-10.

    State: sum (s).
    """

    _rules = (Rule("adagrad_"),)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        **options: Unpack[Options],
    ) -> None:
        numbers = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        super().__init__(params, numbers, options)


class RMSprop(FusedOptimizer):
    """Tieleman & Hinton, lecture 6.5 of "Neural networks for machine learning" (2012), as in torch.

        g = g + weight_decay w
        v = alpha v + (1 - alpha) g^2
        u = g / (sqrt(v) + eps), with momentum b = momentum b + u instead
        w = w - lr u

    Args:
        lr: learning rate. Default 1e-2.
        alpha: decay rate of v. Default 0.99.
        eps: added to the denominator. Default 1e-8.
        weight_decay: what is added to the gradient, times the weight. Default 0.
        momentum: decay rate of b. Default 0: no b.
        centered: subtract the square of the averaged gradient from v (Graves 2013). The difference
            needs float32 states. Default False.

    State: square_avg (v), momentum_buffer (b) if a group has momentum or with centered, and
    grad_avg with centered.
    """

    _rules = (Rule("plain_rmsprop_"), Rule("rmsprop_"), Rule("centered_rmsprop_"))

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        **options: Unpack[Options],
    ) -> None:
        if centered:
            _keep_in_float32(options)
        numbers = {
            "lr": lr,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "centered": centered,
        }
        super().__init__(params, numbers, options)

    def _rule_of(self, group: Group) -> Rule:
        """Centered, with momentum, or neither."""
        plain, with_momentum, centered = self._rules
        if is_on(group, "centered"):
            return centered
        return with_momentum if group.get("momentum") else plain

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As every fused optimizer's; a centered group has float32 squares."""
        if param_group.get("centered"):
            _keep_in_float32(param_group)
        super().add_param_group(param_group)


def _keep_in_float32(given: Any) -> None:
    """Has the squares of a centered RMSprop stored in float32; ValueError where asked otherwise.

    given: options, or a param_group.
    """
    if (found := given.get("square_avg")) not in (None, "float32"):
        raise ValueError(f'square_avg must be "float32" if centered, found {found!r}')
    given["square_avg"] = "float32"


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

    _rules = (Rule("adadelta_"),)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        numbers = {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, numbers, options)


class Adamax(FusedOptimizer):
    """Kingma & Ba, "Adam" (2015), algorithm 2, as torch.optim.Adamax.

        g = g + weight_decay w
        m = beta1 m + (1 - beta1) g
        u = max(beta2 u, |g| + eps)
        w = w - lr / (1 - beta1^t) * m / u

    Args:
        lr: learning rate. Default 2e-3.
        betas: decay rates of m and u. Default (0.9, 0.999).
        eps: added to |g|. Default 1e-8.
        weight_decay: what is added to the gradient, times the weight. Default 0.

    State: exp_avg (m) and exp_inf (u).
    """

    _rules = (Rule("adamax_"),)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, numbers, options)


class Lion(FusedOptimizer):
    """Chen et al., "Symbolic discovery of optimization algorithms" (2023), algorithm 2.

        c = beta1 m + (1 - beta1) g
        m = beta2 m + (1 - beta2) g
        w = (1 - lr weight_decay) w - lr sign(c)

    Every element moves by lr: use a third to a tenth of AdamW's lr, and 3 to 10 times its decay.

    Args:
        lr: learning rate. Default 1e-4.
        betas: decay rates of the direction c and of the average m. Default (0.9, 0.99).
        weight_decay: the weights shrink by lr times this at each step. Default 0.
        cautious: as AdamW's. Default False.

    State: exp_avg (m).
    """

    _rules = (Rule("lion_"),)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        cautious: bool = False,
        **options: Unpack[Options],
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "cautious": cautious}
        super().__init__(params, numbers, options)
