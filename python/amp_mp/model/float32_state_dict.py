"""A model's float32 weights: read from its optimizer's masters, and loaded into them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.state.masters import refuse_swapped
from amp_mp.optim.state.original_values import drop, original_of
from amp_mp.sharding.shards import is_dtensor, like, local_of, part, why_foreign


def masters_apart(optimizer: Any) -> dict[Tensor, Tensor]:
    """The masters of an FP16_Optimizer around one of torch's; TypeError for no optimizer."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, found {optimizer!r}")
    if not hasattr(optimizer, "fp16_groups") or isinstance(optimizer.optimizer, FusedOptimizer):
        return {}
    groups = zip(optimizer.fp16_groups, optimizer.fp32_from_fp16_groups, strict=True)
    return {p: m for low, own in groups for p, m in zip(low, own, strict=True)}


def float32_state_dict(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The model's state dict with every low-precision floating-point tensor as float32.

    A parameter that has a master gives the master, exactly; before the first step after `prepare`
    the values that were rounded. Others are cast up. All are copies, of what is tied one. DTensors
    give DTensors, placed as they are; no process sends anything. optimizer: of amp_mp,
    FP16_Optimizer or LARC, or any other, which has no masters. TypeError for no optimizer.
    """
    refuse_swapped(model.parameters(), "float32_state_dict()")
    apart = masters_apart(optimizer)
    found = model.state_dict(keep_vars=True)
    made: dict[int, Tensor] = {}
    for value in {id(each): each for each in found.values()}.values():
        is_low = isinstance(value, nn.Parameter) and value.dtype in LOW_PRECISION
        state = optimizer.state.get(value) if is_low and value not in apart else None
        master = _C.master_of(value, state) if state else apart.get(value) if is_low else None
        if master is None and value.dtype in LOW_PRECISION:
            master = original_of(value)
        exact = value if master is None else master
        exact = exact if is_dtensor(exact) else like(exact, value)
        dtype = torch.float32 if exact.dtype in LOW_PRECISION else exact.dtype
        made[id(value)] = exact.detach().to(dtype, copy=True)
    return {name: made[id(value)] for name, value in found.items()}


@torch.no_grad()
def load_float32_state_dict(
    model: nn.Module, optimizer: Optimizer, state_dict: dict[str, Any], strict: bool = True
) -> Any:
    """Loads a float32 model's state dict; no bit is lost where the optimizer has masters.

    Weights become the rounded values, masters the values themselves. Other optimizer states stay.
    A sharded model's DTensors are loaded from DTensors; torch.distributed.checkpoint.state_dict's
    set_model_state_dict makes them of whole tensors. Returns what Module.load_state_dict does, and
    raises what it does; ValueError for another rank's DTensors, TypeError for no optimizer.
    """
    for name, value in state_dict.items():
        if wrong := why_foreign(value):
            raise ValueError(f"state_dict: {name!r} {wrong}; nothing was loaded")
    refuse_swapped(model.parameters(), "load_float32_state_dict()")
    own = {*masters_apart(optimizer), *(p for g in optimizer.param_groups for p in g["params"])}
    result = model.load_state_dict(state_dict, strict=strict)
    named = model.named_parameters(remove_duplicate=False)
    low = {n: p for n, p in named if n in state_dict and p.dtype in LOW_PRECISION and p in own}
    for param in low.values():  # or a tie that equals them would keep torch's rounding
        drop(param)
    if hasattr(optimizer, "masters"):
        with optimizer.masters(low) as masters:
            for name, master in masters.items():
                local_of(master).copy_(part(state_dict[name], low[name]))
    return result
