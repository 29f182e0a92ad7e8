"""LARC around any optimizer: Apex's apex.parallel.LARC."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_mp.dtypes import NATIVE
from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.step.gather import ParamInfo, param_infos
from amp_mp.sharding.gradients import GradientStatistics, local_gradient, place_gradient
from amp_mp.sharding.shards import local_of


class LARC(Optimizer):
    """You, Gitman & Ginsburg, "Large batch training of convolutional networks" (2017), as in Apex.

    Before each step of the inner optimizer every gradient is changed in place:

        ratio = trust_coefficient |w| / (|g| + weight_decay |w| + eps)
        ratio = min(ratio / lr, 1) with clip
        g = (g + weight_decay w) ratio; unchanged where |w| or |g| is 0

    The inner optimizer then steps without weight decay. Norms are those of whole tensors, also of
    DTensors, and the host does not wait for them. Gradients must be unscaled and clipped before:
    a GradScaler or FP16_Optimizer around this optimizer unscales them, and
    torch.nn.utils.clip_grad_norm_ comes before step(), as with any optimizer. Arithmetic is
    float32; a float16 or bfloat16 gradient is rounded once more. `amp.optim.LARS(clip=True)` is the
    same around SGD in the fused step, which writes no gradient.

    param_groups, state, state_dict and defaults are the inner optimizer's, so schedulers and
    checkpoints see no difference.

    Args:
        optimizer: any torch.optim.Optimizer.
        trust_coefficient: factor of the ratio. Default 0.02.
        clip: whether the ratio is limited, so that no layer's rate exceeds lr. Default True.
        eps: added to the ratio's denominator. Default 1e-8.

    Raises:
        TypeError: optimizer is no Optimizer, or is a LARC; in step, gradients that are sparse or
            not of float32, float16 or bfloat16.
        ValueError: a negative trust_coefficient or eps; an inner optimizer that clips
            (max_grad_norm) or steps in the backward pass (attach), which LARC would come too late
            for, here and in step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, LARC):
            raise TypeError(
                "optimizer must be a torch.optim.Optimizer other than LARC, found "
                f"{type(optimizer).__name__}"
            )
        for name, number in (("trust_coefficient", trust_coefficient), ("eps", eps)):
            if not number >= 0:
                raise ValueError(f"{name} must not be negative, found {number!r}")
        _refuse_too_late(optimizer)
        self.optim = optimizer  # Apex's name
        self.trust_coefficient, self.clip, self.eps = trust_coefficient, clip, eps
        self._statistics: GradientStatistics | None = None
        super().__init__(optimizer.param_groups, optimizer.defaults)  # hooks, and profiling

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        pass  # torch's constructor would empty it

    @property
    def state(self) -> Any:
        """The inner optimizer's."""
        return self.optim.state

    @state.setter
    def state(self, state: Any) -> None:
        pass

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The inner optimizer's."""
        if all(param_group is not known for known in self.param_groups):  # torch's constructor
            self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inner optimizer's."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The inner optimizer's."""
        self.optim.zero_grad(set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_statistics"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._statistics = None
        super().__setstate__({})  # hooks, and profiling

    def __repr__(self) -> str:
        numbers = f"trust_coefficient={self.trust_coefficient}, clip={self.clip}, eps={self.eps}"
        return f"LARC({self.optim!r}, {numbers})"

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scales the gradients and steps the inner optimizer; returns what it or closure returns.

        closure: computes the loss and the gradients; called once.
        """
        _refuse_too_late(self.optim)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [group.get("weight_decay", 0.0) for group in self.param_groups]
        self._scale_gradients(decays)
        try:
            for group in self.param_groups:
                if "weight_decay" in group:
                    group["weight_decay"] = 0.0
            found = self.optim.step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = decay
        return found if closure is None else loss

    def _scale_gradients(self, decays: list[float]) -> None:
        params = list(param_infos(self.param_groups))
        grads = [_checked(param, info) for param, info in params]
        weights = [local_of(param.detach()) for param, _ in params]
        known = self._statistics
        if known is None or not known.is_of(self.param_groups):
            known = self._statistics = GradientStatistics([param for param, _ in params])
        present = [w if g is not None else None for g, w in zip(grads, weights, strict=True)]
        squares = known.of_tensors(grads, present)
        norms = squares[:, 0].sqrt(), squares[:, 3].sqrt()
        begin = 0
        for group, decay in zip(self.param_groups, decays, strict=True):
            end = begin + len(group["params"])
            own = slice(begin, end)
            factors = self._factors(norms[0][own], norms[1][own], decay, group["lr"])
            for grad, weight, ratio, added in zip(grads[own], weights[own], *factors, strict=True):
                if grad is None:
                    continue
                scaled = grad.float()  # itself, if it is float32
                if decay != 0:
                    scaled = scaled.addcmul_(weight.float(), added.to(grad.device))
                scaled = scaled.mul_(ratio.to(grad.device))
                if scaled is not grad:
                    grad.copy_(scaled)
            begin = end

    def _factors(
        self, grad: Tensor, weight: Tensor, decay: float, lr: float | Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Each tensor's ratio, and what its weight is multiplied by, in float32."""
        adapts = (grad > 0) & (weight > 0)
        ratio = self.trust_coefficient * weight / (grad + decay * weight + self.eps)
        if self.clip:
            rate = lr.to(ratio.device) if isinstance(lr, Tensor) else lr
            ratio = (ratio / rate).clamp(max=1)
        return torch.where(adapts, ratio, 1.0).float().unbind(), (decay * adapts.float()).unbind()


def _refuse_too_late(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, FusedOptimizer):
        return
    if optimizer.max_grad_norm is not None:
        raise ValueError(
            "optimizer has max_grad_norm, and would clip what LARC has scaled: leave it out and "
            "call torch.nn.utils.clip_grad_norm_ before step()"
        )
    if optimizer.attachment is not None:
        raise ValueError(
            "optimizer is attached to the backward pass, in which LARC has no part: remove() the "
            "attachment, or use amp.optim.LARS(clip=True)"
        )


def _checked(param: Tensor, info: ParamInfo) -> Tensor | None:
    place_gradient(param, info.label)  # what is scaled has to be .grad itself
    grad = local_gradient(param, info.label)
    if grad is not None and (grad.layout != torch.strided or grad.dtype not in NATIVE):
        raise TypeError(
            f"LARC: the gradient of {info.label} is {grad.dtype}, {grad.layout}; it must be dense "
            "and float32, float16 or bfloat16"
        )
    return grad
