"""SGD with momentum, and LARS; their rules are csrc/core/rules/sgd.h."""

from typing import Any, Unpack

from torch import Tensor

from amp_mp.dtypes import check_choice
from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.options import Options
from amp_mp.optim.rule import Group, Rule


class SGD(FusedOptimizer):
    """Sutskever et al., "On the importance of initialization and momentum" (2013), as in torch.

        g = g + weight_decay w
        b = g at a parameter's first step, else momentum b + (1 - dampening) g
        w = w - lr (g + momentum b if nesterov else b)

    momentum_form="scaled" is Caffe's older form, with the learning rate inside the buffer:

        b = momentum b + lr g
        w = w - (lr g + momentum b if nesterov else b)

    Both are equal where lr is constant and nothing is rounded: a buffer of the scaled form is lr
    times the other. In float16 lr g may vanish where g does not: see docs/benchmarks.md.

    Args:
        lr: learning rate. Default 1e-3.
        momentum: decay rate of b. Default 0: no b.
        dampening: reduces what is added to b. Default 0.
        weight_decay: what is added to the gradient, times the weight. Default 0.
        nesterov: Nesterov's momentum; needs momentum > 0 and dampening = 0. Default False.
        momentum_form: "unscaled" or "scaled", which has no dampening. Default "unscaled".

    State: momentum_buffer (b), if a group has momentum.
    """

    _rules = (Rule("plain_sgd_"), Rule("sgd_"), Rule("scaled_sgd_"))

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        momentum_form: str = "unscaled",
        **options: Unpack[Options],
    ) -> None:
        check_choice("momentum_form", momentum_form, ("unscaled", "scaled"))
        if momentum_form == "scaled" and dampening != 0:
            raise ValueError(f'momentum_form="scaled" has no dampening, found {dampening=!r}')
        self.momentum_form = momentum_form
        numbers = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, numbers, options)

    def _rule_of(self, group: Group) -> Rule:
        """With a momentum buffer if the group has momentum, in the form of momentum_form."""
        plain, unscaled, scaled = self._rules
        if not group.get("momentum"):
            return plain
        return unscaled if self.momentum_form == "unscaled" else scaled

    def torch_state_dict(self) -> dict[str, Any]:
        """See FusedOptimizer.torch_state_dict."""
        found = super().torch_state_dict()
        for state in found["state"].values():
            buffer = state.get("momentum_buffer")
            # torch knows a first step, which has no dampening, by a buffer that is not there yet.
            if buffer is not None and state["step"] == 0 and not buffer.any():
                del state["momentum_buffer"]
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "momentum_form": self.momentum_form}


class LARS(FusedOptimizer):
    """You, Gitman & Ginsburg, "Large batch training of convolutional networks" (2017).

    SGD with momentum on gradients that are scaled tensor by tensor, as Apex's LARC(SGD(...)):

        ratio = trust_coefficient |w| / (|g| + weight_decay |w| + eps)
        g = ratio (g + weight_decay w); unchanged where |w| or |g| is 0
        b = g at a parameter's first step, else momentum b + (1 - dampening) g
        w = w - lr (g + momentum b if nesterov else b)

    Args:
        lr: learning rate. Default 1e-3.
        momentum, dampening, nesterov: as SGD. Default 0.9, 0, False.
        weight_decay: what is added to the gradient, times the weight. Default 0.
        trust_coefficient: factor of the ratio. Default 0.02.
        clip: True is LARC: the ratio is min(ratio / lr, 1), so that no layer's rate exceeds lr.
            Default False.
        eps: added to the ratio's denominator. Default 1e-8.

    State: momentum_buffer (b).
    """

    _rules = (Rule("lars_"),)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        trust_coefficient: float = 0.02,
        clip: bool = False,
        eps: float = 1e-8,
        **options: Unpack[Options],
    ) -> None:
        numbers = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "trust_coefficient": trust_coefficient,
            "clip": clip,
            "eps": eps,
        }
        super().__init__(params, numbers, options)
