"""A model's float32 weights: read from its optimizer's masters, and loaded into them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.model.original_values import drop_original, original_of
from amp_mp.model.sharded import local_part
from amp_mp.optim.base import FusedOptimizer, stepper_of
from amp_mp.optim.state.masters import master_of, set_master
from amp_mp.sharding.shards import is_dtensor, like, local_of, other_rank

swapped: set[int] = set()  # ids of the parameters that hold averages now


def refuse_swapped(tensors: Iterable[Tensor], what: str) -> None:
    """Raises RuntimeError inside of `AveragedModel.swap` for one of the tensors."""
    if swapped and not swapped.isdisjoint(map(id, tensors)):
        raise RuntimeError(
            f"{what} inside of AveragedModel.swap(), where the model's weights are averages; do it "
            "after the block"
        )


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
    the values that were rounded. Others are cast up. All are copies. DTensors give DTensors,
    placed as they are; no process sends anything. optimizer: of amp_mp, FP16_Optimizer or LARC, or
    any other, which has no masters. TypeError for no optimizer.
    """
    refuse_swapped(model.parameters(), "float32_state_dict()")
    apart = masters_apart(optimizer)
    result = {}
    for name, value in model.state_dict(keep_vars=True).items():
        is_low = isinstance(value, nn.Parameter) and value.dtype in LOW_PRECISION
        state = optimizer.state.get(value) if is_low and value not in apart else None
        master = master_of(value, state) if state else apart.get(value) if is_low else None
        if master is None and value.dtype in LOW_PRECISION:
            master = original_of(value)
        exact = value if master is None else master
        exact = exact if is_dtensor(exact) else like(exact, value)
        dtype = torch.float32 if exact.dtype in LOW_PRECISION else exact.dtype
        result[name] = exact.detach().to(dtype, copy=True)
    return result


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
        if (rank := other_rank(value)) is not None:
            raise ValueError(
                f"state_dict: {name!r} is the part of rank {rank}, which has saved it; load on "
                "each rank the file that the same rank has saved, or use amp_mp.checkpoint; "
                "nothing was loaded"
            )
    refuse_swapped(model.parameters(), "load_float32_state_dict()")
    apart, fused = masters_apart(optimizer), getattr(optimizer, "optimizer", optimizer)
    result = model.load_state_dict(state_dict, strict=strict)
    for name, param in model.named_parameters(remove_duplicate=False):
        if param in apart and name in state_dict:
            local_of(apart[param]).copy_(local_part(state_dict[name], param))
            drop_original(param, forget=True)
    if apart or not isinstance(fused, FusedOptimizer):
        return result
    pairs = zip(fused.param_groups, stepper_of(fused).group_rules(), strict=True)
    stepped = {param: pair for pair in pairs for param in pair[0]["params"]}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param.dtype not in LOW_PRECISION or param not in stepped or name not in state_dict:
            continue
        (group, rule), state = stepped[param], fused.state[param]
        _C.init_state(rule, group, param, state)
        weight, loaded = local_of(param), local_part(state_dict[name], param)
        values = torch.empty_like(weight, dtype=torch.float32).copy_(loaded)
        if group["master"] != "none":
            set_master(group["master"], param, state, values)
            drop_original(param, forget=True)
    stepper_of(fused).forget()
    return result
