"""NVCaffe's solver: its type of weights and history, and gradients that stay scaled."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from amp_mp import _C, optim
from amp_mp.compat.typed_forward import KEPT, NORM
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.optim.base import FusedOptimizer, rules_of
from amp_mp.scaling.policies import check_scale

# Each type's word, how a model gets it, and what it means.
TYPES = {
    torch.float32: (
        "FLOAT",
        "model.float()",
        'float32 weights, or masters of them: amp.optim with memory="exact"',
    ),
    torch.float16: (
        "FLOAT16",
        "amp.apex.fp16_utils.convert_network(model, torch.float16)",
        "float16 weights and history, no masters: amp.optim with types.solver.options()",
    ),
    torch.float64: ("DOUBLE", "model.double()", "float64 weights and history: torch.optim"),
}
# How a state is stored in float16, by its kind. A square's root does not underflow.
FLOAT16_STATES = {"moment": "float16", "square": "float16_root"}
# Optimizers whose step is linear in the gradient, and those that divide it by a root of squares.
LINEAR = (torch.optim.SGD, optim.SGD)
NORMALISED = (
    torch.optim.Adam,
    torch.optim.NAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    optim.AdamW,
    optim.NAdam,
    optim.RMSprop,
    optim.Adagrad,
)


class SolverTypes:
    """The type of weights and history, and the arguments of optimizers that follow from it.

    FLOAT: parameters are float32, or low-precision with float32 masters. FLOAT16: float16 without
    masters, and float16 history (second moments as roots); norms and what is kept may be float32.
    DOUBLE: float64. Raises ValueError naming a trainable parameter of another dtype.
    """

    def __init__(self, model: nn.Module, kinds: Mapping[nn.Module, str], dtype: torch.dtype):
        if dtype not in TYPES:
            words = ", ".join(word for word, *_ in TYPES.values())
            raise ValueError(f"solver_data_type must be {words}; found {dtype}")
        word, conversion, _ = TYPES[dtype]
        allowed = {dtype, *LOW_PRECISION} if dtype == torch.float32 else {dtype}
        wide = {p for m, kind in kinds.items() if kind in (KEPT, NORM) for p in m.parameters()}
        for name, param in model.named_parameters():
            if not (param.requires_grad and param.is_floating_point()) or param.dtype in allowed:
                continue
            if dtype == torch.float16 and param.dtype == torch.float32 and param in wide:
                continue
            raise ValueError(
                f"solver_data_type={word}: model.{name} is {param.dtype}; call {conversion} first, "
                "or choose the type that it has"
            )
        self.dtype = dtype
        self._has_masters = any(p.dtype in LOW_PRECISION for p in model.parameters())

    def options(self, optimizer: type[Optimizer]) -> dict[str, Any]:
        """The arguments that give an optimizer of this class weights and history of the type.

        Raises TypeError for another class, ValueError where the class cannot have the type.
        """
        if not isinstance(optimizer, type) or not issubclass(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer class, found {optimizer!r}")
        name = optimizer.__name__
        word = TYPES[self.dtype][0]
        if issubclass(optimizer, FusedOptimizer):
            if self.dtype == torch.float64:
                raise ValueError(f"{name} has no float64 parameters; use torch.optim for {word}")
            if self.dtype == torch.float32:
                return {"memory": "exact"}
            kinds = _C.kinds_of(rules_of(optimizer))
            states = {name: FLOAT16_STATES.get(kind) for name, kind in kinds.items()}
            return {"master": "none"} | {n: format for n, format in states.items() if format}
        if self.dtype == torch.float16 or (self.dtype == torch.float32 and self._has_masters):
            raise ValueError(
                f"{name} would compute in its low-precision parameters' own dtype; use amp.optim's "
                "optimizer, which computes in float32"
            )
        return {}

    def __str__(self) -> str:
        word, _, meaning = TYPES[self.dtype]
        return f"solver_data_type {word}: {meaning}"


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
