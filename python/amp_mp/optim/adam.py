"""Adam, AdamW, NAdam and RAdam; their rules are in csrc/core/rules/adam.h, AdamH in layerwise.h."""

from typing import Any, ClassVar, Unpack

from torch import Tensor

from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.options import Options
from amp_mp.optim.rule import Group, Rule, is_on

ADAMH = Rule("adamh_")


class AdamW(FusedOptimizer):
    """Loshchilov & Hutter, "Decoupled weight decay regularization" (2019), as torch.optim.AdamW.

        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        w = (1 - lr weight_decay) w - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

    t counts the parameter's own steps.

    Args:
        lr: learning rate. Default 1e-3.
        betas: decay rates of m and v. Default (0.9, 0.999).
        eps: added to the denominator. Default 1e-8.
        weight_decay: the weights shrink by lr times this at each step. Default 0.01.
        amsgrad: use the largest v so far in the last line (Reddi et al. 2018). Default False.
        cautious: decay only where update * weight >= 0, by the float32 master (Chen et al.,
            "Cautious weight decay", 2025, algorithm 1). Default False.
        hyperball: keep the 2-norm R that each matrix begins with, in place of weight_decay, which
            is not read (Wen et al., "Hyperball optimization", 2026): docs/muon.md. With u for
            m / (sqrt(v / (1 - beta2^t)) + eps) the last line is then

                w = w - lr R u / |u|
                w = R w / |w|

            of the float32 master, so lr is relative: 0.01 turns a matrix by about 0.01 radian. For
            parameters of two and more dimensions; give others a param_group with hyperball=False.
            Default False.

    State: exp_avg (m), exp_avg_sq (v), max_exp_avg_sq with amsgrad, radius (R) with hyperball.
    """

    _rules: ClassVar[tuple[Rule, ...]] = (Rule("adamw_"), Rule("amsgrad_adamw_"), ADAMH)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        cautious: bool = False,
        hyperball: bool = False,
        **options: Unpack[Options],
    ) -> None:
        numbers = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "cautious": cautious,
            "hyperball": hyperball,
        }
        super().__init__(params, numbers, options)

    def _rule_of(self, group: Group) -> Rule:
        """On the sphere, with or without amsgrad."""
        if is_on(group, "hyperball") and ADAMH in self._rules:
            return ADAMH
        return self._rules[is_on(group, "amsgrad")]


class Adam(AdamW):
    """Kingma & Ba, "Adam: a method for stochastic optimization" (2015), as torch.optim.Adam.

        g = g + weight_decay w
        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        w = w - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

    Args:
        weight_decay: what is added to the gradient, times the weight. Default 0. (For torch's
            decoupled_weight_decay=True use AdamW.)
        lr, betas, eps, amsgrad: as AdamW, with the same defaults.

    State: as AdamW's.
    """

    _rules = (Rule("adam_"), Rule("amsgrad_adam_"))

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
        numbers = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
        }
        super(AdamW, self).__init__(params, numbers, options)


class NAdam(FusedOptimizer):
    """Dozat, "Incorporating Nesterov momentum into Adam" (2016), as torch.optim.NAdam.

        g = g + weight_decay w, or with decoupled_weight_decay w = (1 - lr weight_decay) w
        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        mu_t = beta1 (1 - 0.96^(t momentum_decay) / 2), p_t = mu_1 mu_2 ... mu_t
        n = (1 - mu_t) / (1 - p_t) * g + mu_(t+1) / (1 - p_t mu_(t+1)) * m
        w = w - lr n / (sqrt(v / (1 - beta2^t)) + eps)

    Args:
        lr: learning rate. Default 2e-3.
        betas: decay rates of m and v. Default (0.9, 0.999).
        eps: added to the denominator. Default 1e-8.
        weight_decay: what is added to the gradient, times the weight. Default 0.
        momentum_decay: how fast mu_t grows from beta1 / 2 to beta1. Default 4e-3.
        decoupled_weight_decay: weight_decay shrinks the weights as AdamW's does. Default False.
        cautious: as AdamW's; needs decoupled_weight_decay. Default False.

    State: exp_avg (m), exp_avg_sq (v) and mu_product (p_t, one number per tensor).
    """

    _rules = (Rule("nadam_"),)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        cautious: bool = False,
        **options: Unpack[Options],
    ) -> None:
        numbers = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum_decay": momentum_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "cautious": cautious,
        }
        super().__init__(params, numbers, options)


class RAdam(FusedOptimizer):
    """Liu et al., "On the variance of the adaptive learning rate" (2020), as torch.optim.RAdam.

        g = g + weight_decay w, or with decoupled_weight_decay w = (1 - lr weight_decay) w
        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        rho = 2 / (1 - beta2) - 1, rho_t = rho - 2 t beta2^t / (1 - beta2^t)
        r = sqrt((rho_t - 4) (rho_t - 2) rho / ((rho - 4) (rho - 2) rho_t))
        w = w - lr m / (1 - beta1^t) * r sqrt(1 - beta2^t) / (sqrt(v) + eps)  where rho_t > 5
        w = w - lr m / (1 - beta1^t)                                          where rho_t <= 5

    rho_t depends on beta2 and the parameter's own steps alone. With beta2 = 0.999 the first five
    steps are without v, with beta2 up to 2/3 all are. They are torch's up to beta2 = 0.99999;
    beyond it the rounding of rho_t in double decides about the fifth step.

    Args:
        lr: learning rate. Default 1e-3.
        betas: decay rates of m and v. Default (0.9, 0.999).
        eps: added to the root of v. Default 1e-8.
        weight_decay: what is added to the gradient, times the weight. Default 0.
        decoupled_weight_decay: weight_decay shrinks the weights as AdamW's does. Default False.
        cautious: as AdamW's; needs decoupled_weight_decay. Default False.

    State: exp_avg (m) and exp_avg_sq (v).
    """

    _rules = (Rule("radam_"),)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        *,
        cautious: bool = False,
        **options: Unpack[Options],
    ) -> None:
        numbers = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "cautious": cautious,
        }
        super().__init__(params, numbers, options)
