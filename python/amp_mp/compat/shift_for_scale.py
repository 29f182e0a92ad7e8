"""Loss scaling by hand: hyperparameters that do with scaled gradients what they did with true ones.

For loops that never unscale, as NVCaffe's recipe has it: loss times S, lr over S, weight decay
times S. Which numbers move depends on the optimizer, because some of them divide the scale away.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from amp_mp import optim
from amp_mp.optim.rule import Group
from amp_mp.scaling.policies import check_scale


def shift_for_scale(optimizer: Optimizer, scale: float) -> Optimizer:
    """Changes every param_group so that gradients `scale` times too large make the same steps.

    SGD: d = g + weight_decay w and the step lr d are linear in g, so lr / S and weight_decay S.
    Adam, RMSprop, Adagrad: the step is g over the root of g's squares, which divides S away; eps S,
    and weight_decay S where it joins the gradient. AdamW's decay does not, and stays.
    Exact for powers of two, as long as nothing overflows. Undone by 1 / scale.

    Args:
        optimizer: one of torch.optim's or amp_mp.optim's of these kinds, before its first step.
        scale: what the loss will be multiplied by.

    Returns:
        The optimizer.

    Raises:
        ValueError: no positive number; a kind of optimizer for which no such numbers exist
            (Adadelta's one eps serves gradients and updates) or are known: unscale its gradients
            instead.
    """
    check_scale(scale, "scale")
    rule = next((rule for kind, rule in _RULES if isinstance(optimizer, kind)), None)
    if rule is None:
        raise ValueError(
            f"optimizer: no hyperparameters of {type(optimizer).__name__} make up for a loss "
            "scale; unscale the gradients, with amp.FP16_Optimizer or a GradScaler"
        )
    for group in optimizer.param_groups:
        rule(group, scale)
    norm = getattr(optimizer, "max_grad_norm", None)
    if norm is not None:
        optimizer.max_grad_norm = norm * scale  # type: ignore[attr-defined]
    return optimizer


def _linear(group: Group, scale: float) -> None:
    group["lr"] = group["lr"] / scale
    group["weight_decay"] *= scale


def _normalised(group: Group, scale: float) -> None:
    group["eps"] *= scale
    if not group.get("decoupled_weight_decay", False):
        group["weight_decay"] *= scale


def _decoupled(group: Group, scale: float) -> None:
    group["eps"] *= scale


# AdamW first: in torch it is an Adam.
_RULES: tuple[tuple[Any, Callable[[Group, float], None]], ...] = (
    (optim.Adam, _normalised),
    ((torch.optim.AdamW, optim.AdamW), _decoupled),
    ((torch.optim.SGD, optim.SGD), _linear),
    ((torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad), _normalised),
    ((optim.RMSprop, optim.Adagrad), _normalised),
)
