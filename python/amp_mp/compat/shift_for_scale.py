"""Hyperparameters for loops that never unscale gradients, as in NVCaffe's recipe."""

import torch
from torch.optim.optimizer import Optimizer

from amp_mp import optim
from amp_mp.scaling.policies import check_scale

# Optimizers whose step is linear in the gradient, and those that divide it by a root of squares.
LINEAR = (torch.optim.SGD, optim.SGD)
NORMALISED = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam),
    *(torch.optim.RMSprop, torch.optim.Adagrad),
    *(optim.Adam, optim.AdamW, optim.NAdam, optim.RMSprop, optim.Adagrad),
)


def shift_for_scale(optimizer: Optimizer, scale: float) -> Optimizer:
    """Changes every param_group so that gradients S = `scale` times too large make the same steps.

    SGD: d = g + weight_decay w and the step lr d are linear in g, so lr / S and weight_decay S.
    Adam, NAdam, RMSprop, Adagrad: the step is g over the root of g's squares, which divides S away;
    eps S, and weight_decay S where it joins the gradient. AdamW's decay does not, and stays.
    Exact for powers of two, as long as nothing overflows. Undone by 1 / scale.

    optimizer: one of torch.optim's or amp_mp.optim's of these kinds, before its first step. scale:
    what the loss will be multiplied by. Returns the optimizer. ValueError: scale is not a positive
    number; or an optimizer for which no such numbers exist (Adadelta's eps serves gradients and
    updates, RAdam's first steps are linear in the gradient, later ones not) or are known.
    """
    check_scale(scale, "scale")
    if not isinstance(optimizer, LINEAR + NORMALISED):
        raise ValueError(
            f"optimizer: no hyperparameters of {type(optimizer).__name__} make up for a loss "
            "scale; unscale the gradients, with amp.FP16_Optimizer or a GradScaler"
        )
    # torch's AdamW is an Adam, and amp_mp's Adam is an AdamW.
    is_adamw = isinstance(optimizer, torch.optim.AdamW | optim.AdamW)
    is_adamw = is_adamw and not isinstance(optimizer, optim.Adam)
    for group in optimizer.param_groups:
        if isinstance(optimizer, LINEAR):
            group["lr"] = group["lr"] / scale
        else:
            group["eps"] *= scale
        if not (is_adamw or group.get("decoupled_weight_decay", False)):
            group["weight_decay"] *= scale
    if (norm := getattr(optimizer, "max_grad_norm", None)) is not None:
        optimizer.max_grad_norm = norm * scale  # type: ignore[union-attr]
    return optimizer
