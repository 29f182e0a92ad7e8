"""LAMB and NovoGrad; their rules are csrc/core/rules/layerwise.h."""

from typing import Any, Unpack

from torch import Tensor

from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.options import Options
from amp_mp.optim.rule import Rule


class LAMB(FusedOptimizer):
    """You et al., "Large batch optimization for deep learning" (2020), algorithm 2.

        m, v: as Adam
        r = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay w
        w = w - lr |w| / |r| r

    |w| / |r| is the ratio of a tensor's 2-norms, and 1 where one of them is 0.

    Args:
        lr: learning rate. Default 1e-3.
        betas: decay rates of m and v. Default (0.9, 0.999).
        eps: added to the denominator. Default 1e-6.
        weight_decay: what is added to the update, times the weight. Default 0.01.
        always_adapt: False leaves out the ratio in groups without weight decay, as Apex does.
            Default True.
        cautious: weight_decay w is added only where its sign is that of the rest of r, as AdamW's.
            Default False.

    State: exp_avg (m) and exp_avg_sq (v).
    """

    _rules = (Rule("lamb_"),)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        always_adapt: bool = True,
        cautious: bool = False,
        **options: Unpack[Options],
    ) -> None:
        numbers = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "always_adapt": always_adapt,
            "cautious": cautious,
        }
        super().__init__(params, numbers, options)


class NovoGrad(FusedOptimizer):
    """Ginsburg et al., "Stochastic gradient methods with layer-wise adaptive moments" (2019).

        v = |g|^2 at a tensor's first step, else beta2 v + (1 - beta2) |g|^2
        m = beta1 m + g / (sqrt(v) + eps) + weight_decay w
        w = w - lr m

    Args:
        lr: learning rate. Default 1e-2.
        betas: decay rates of m and v. Default (0.95, 0.98), the paper's.
        eps: added to the denominator. Default 1e-8.
        weight_decay: what is added to m, times the weight. Default 0.
        grad_averaging, bias_correction, reg_inside_moment: False, False, True for the above, the
            default. NVIDIA's form is True, True, False:
            m = beta1 m + (1 - beta1) g
            w = w - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay w)

    State: exp_avg (m) and layer (v, one number per tensor).
    """

    _rules = (Rule("novograd_"),)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float] = (0.95, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        grad_averaging: bool = False,
        bias_correction: bool = False,
        reg_inside_moment: bool = True,
        **options: Unpack[Options],
    ) -> None:
        numbers = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "bias_correction": bias_correction,
            "reg_inside_moment": reg_inside_moment,
        }
        super().__init__(params, numbers, options)
