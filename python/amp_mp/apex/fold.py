"""Unscaling after scale_loss: in place, or by the step of an optimizer with float16 gradients.

In place, a float16 gradient would lose what the scale has kept from vanishing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amp_mp.apex.fp16_utils import master_params
from amp_mp.apex.gradients import copy_all_, gradients_of
from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.step.gradient_marks import GradientMarks, nonzero
from amp_mp.optim.step.handed import Handed, carries_scale


def may_fold(optimizer: Optimizer, optimizers: Sequence[Optimizer]) -> bool:
    """Whether an optimizer's step can unscale; call it before the backward.

    It cannot where another of the optimizers shares a parameter, or where there are true gradients
    to add to. Raises RuntimeError where gradients that carry a scale were written by hand.
    """
    if not isinstance(optimizer, FusedOptimizer) or not optimizer.amp_scaling:
        return False
    own = list(master_params(optimizer))
    others = {p for each in optimizers if each is not optimizer for p in master_params(each)}
    if carries_scale(optimizer):
        return others.isdisjoint(own)
    if optimizer.handed is not None and optimizer.handed.marks is not None:
        optimizer.handed = None  # of gradients that are gone
    return others.isdisjoint(own) and not nonzero(own)


def has_float16(optimizer: Optimizer) -> bool:
    """Whether a gradient of the optimizer is float16, or carries a scale from an earlier loss."""
    assert isinstance(optimizer, FusedOptimizer)
    grads = [param.grad for param in master_params(optimizer) if param.grad is not None]
    return optimizer.handed is not None or any(grad.dtype == torch.float16 for grad in grads)


def carried_scale(optimizer: Optimizer, scale: float) -> float:
    """The scale that an optimizer's gradients carry: of an earlier loss, else the present one."""
    handed = optimizer.handed if isinstance(optimizer, FusedOptimizer) else None
    return scale if handed is None else float(handed.scale or 1.0)


@torch.no_grad()
def unscale(params: list[Tensor], folding: Sequence[Optimizer], scale: float) -> None:
    """Divides new gradients by the scale; those of `folding` get the scale of the earlier ones."""
    left = dict.fromkeys(params)
    for each in folding:
        own = [param for param in master_params(each) if param in left]
        _multiply(own, carried_scale(each, scale) / scale)
        for param in own:
            del left[param]
    _multiply(list(left), 1.0 / scale)


def _multiply(params: list[Tensor], multiplier: float) -> None:
    if multiplier != 1.0:
        grads = gradients_of(params)
        copy_all_(zip(grads, grads, strict=True), multiplier=multiplier)


def hand(optimizer: Optimizer, scale: float) -> None:
    """Tells an optimizer which scale its gradients carry, from now until they are cleared."""
    assert isinstance(optimizer, FusedOptimizer)
    carried = carried_scale(optimizer, scale)
    marks = GradientMarks(master_params(optimizer))
    optimizer.handed = Handed(carried, measure=carried != scale, marks=marks)
