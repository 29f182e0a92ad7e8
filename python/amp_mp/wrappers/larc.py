"""LARC around any optimizer: Apex's apex.parallel.LARC."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_mp import _C
from amp_mp.dtypes import NATIVE
from amp_mp.optim.base import FusedOptimizer, stepper_of
from amp_mp.param_groups import ParamInfo, param_infos
from amp_mp.sharding.gradients import writable_gradient
from amp_mp.sharding.reduction import WholeStatistics, statistics_of
from amp_mp.sharding.shards import local_of
from amp_mp.wrappers.wrapper import OptimizerAround, shown


class LARC(OptimizerAround):
    """You, Gitman & Ginsburg, "Large batch training of convolutional networks" (2017), as in Apex.

    Before each step of the inner optimizer every gradient is changed in place, in float32:

        ratio = trust_coefficient |w| / (|g| + weight_decay |w| + eps)
        ratio = min(ratio / lr, 1) with clip
        g = (g + weight_decay w) ratio; unchanged where |w| or |g| is 0

    The inner optimizer then steps without weight decay. Norms are those of whole tensors, also of
    DTensors, and the host does not wait for them. Clip before. Under a GradScaler the step
    unscales, in float32; float16 gradients around an amp_mp optimizer then keep a scale until its
    step. `amp.optim.LARS(clip=True)` is the same around SGD in the fused step, which writes no
    gradient. param_groups, state, state_dict and defaults are the inner optimizer's.

    Args:
        optimizer: any torch.optim.Optimizer.
        trust_coefficient, eps: numbers of the ratio. Defaults 0.02 and 1e-8.
        clip: whether the ratio is limited, so that no layer's rate exceeds lr. Default True.

    Raises:
        TypeError: optimizer is not an Optimizer, or is a LARC; in step, gradients that are sparse,
            or not of float32, float16 or bfloat16.
        ValueError: a negative trust_coefficient or eps; here and in step, an inner optimizer that
            clips (max_grad_norm) or steps in the backward pass (attach).
    """

    optim: Any = shown("optimizer")  # Apex's name
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, LARC):
            expected = "optimizer must be a torch.optim.Optimizer other than LARC"
            raise TypeError(f"{expected}, found {type(optimizer).__name__}")
        for name, number in (("trust_coefficient", trust_coefficient), ("eps", eps)):
            if not number >= 0:
                raise ValueError(f"{name} must not be negative, found {number!r}")
        _refuse_too_late(optimizer)
        super().__init__(optimizer)
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps
        self._statistics: WholeStatistics | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Without hooks, as torch's, and without the step of this object that a scheduler put here.
        own = "optimizer", "trust_coefficient", "clip", "eps"
        return {"_statistics": None} | {name: getattr(self, name) for name in own}

    def __repr__(self) -> str:
        numbers = f"trust_coefficient={self.trust_coefficient}, clip={self.clip}, eps={self.eps}"
        return f"LARC({self.optimizer!r}, {numbers})"

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scales the gradients, which the closure computes if given, and steps the optimizer."""
        _refuse_too_late(self.optimizer)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if getattr(self, "found_inf", None):
            return None
        scale = self._scale_gradients(getattr(self, "grad_scale", None))
        decaying = [group for group in self.param_groups if "weight_decay" in group]
        kept = [group["weight_decay"] for group in decaying]
        try:
            for group in decaying:
                group["weight_decay"] = 0.0
            inner: Any = self.optimizer
            if scale is None:
                found = inner.step()
            else:
                found = stepper_of(inner).step_with(_C.StepInputs(scale))
        finally:
            for group, decay in zip(decaying, kept, strict=True):
                group["weight_decay"] = decay
        return found if closure is None else loss

    def _scale_gradients(self, scale: Tensor | float | None) -> Tensor | None:
        """Divides the gradients by a scale and adapts them; returns the scale that they keep."""
        params = list(param_infos(self.param_groups))
        grads = [_checked(param, info) for param, info in params]
        weights = [local_of(param.detach()) for param, _ in params]
        self._statistics = whole = statistics_of(self._statistics, self.param_groups)
        present = [w if g is not None else None for g, w in zip(grads, weights, strict=True)]
        roots = whole.of_whole(whole.measured(grads, present)).sqrt()
        keeps = len(grads) > 0 and getattr(self.optimizer, "amp_scaling", False)
        numbers = self.trust_coefficient, self.clip, self.eps
        return _C.larc_(grads, weights, roots, self.param_groups, *numbers, scale, keeps)


def without_larc(optimizer: Any) -> Any:
    """The optimizer in a LARC, any other itself."""
    return optimizer.optimizer if isinstance(optimizer, LARC) else optimizer


def _refuse_too_late(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, FusedOptimizer):
        return
    if optimizer.max_grad_norm is not None:
        raise ValueError(
            "optimizer has max_grad_norm, and would clip what LARC has scaled: leave it out and "
            "call torch.nn.utils.clip_grad_norm_ before step()"
        )
    if stepper_of(optimizer).release is not None:
        raise ValueError(
            "optimizer is attached to the backward pass, in which LARC has no part: call remove() "
            "of what attach() has returned, or use amp.optim.LARS(clip=True)"
        )


def _checked(param: Tensor, info: ParamInfo) -> Tensor | None:
    grad = writable_gradient(param, info.label)
    if grad is not None and (grad.layout != torch.strided or grad.dtype not in NATIVE):
        raise TypeError(
            f"LARC: the gradient of {info.label} is {grad.dtype}, {grad.layout}; it must be dense "
            "and float32, float16 or bfloat16"
        )
    return grad
