"""Sharded models while they are converted: what FSDP2 allows, and when."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from amp_mp.sharding.shards import is_dtensor
from amp_mp.sharding.units import check_open, units_of


def update_units(model: nn.Module) -> None:
    """Tells FSDP2 that its parameters have new local tensors, as model.to() does."""
    with torch.no_grad():
        for _, _, group in units_of(model):
            for fsdp_param in group.fsdp_params:
                fsdp_param.reset_sharded_param()


def check_units(
    function: str, model: nn.Module, targets: Mapping[int, tuple[Tensor, torch.dtype]]
) -> None:
    """Raises ValueError where FSDP2 could not go on with the new dtypes, given by tensors' ids."""
    names = {id(module): name for name, module in model.named_modules()}
    for name, group in check_open(function, model, targets):
        _check_uniform(function, names, name, group, targets)


def _check_uniform(
    function: str,
    names: Mapping[int, str],
    unit: str,
    group: Any,
    targets: Mapping[int, tuple[Tensor, torch.dtype]],
) -> None:
    by_dtype: dict[torch.dtype, list[str]] = {}
    for each in group.fsdp_params:
        param, owner = each.sharded_param, each._module_info.module
        if param.requires_grad:
            dtype = targets[id(param)][1] if id(param) in targets else param.dtype
            by_dtype.setdefault(dtype, []).append(names.get(id(owner), ""))
    if len(by_dtype) < 2:
        return
    kept = list(dict.fromkeys(by_dtype.pop(torch.float32, [])))
    found = ", ".join(name or "the model itself" for name in kept)
    text = (
        f"model{unit} is one fully_shard unit, whose parameters must have one dtype, and "
        f"{function} would keep these in float32 and convert the rest: {found}. "
    )
    others = {name for names in by_dtype.values() for name in names}
    if kept and others.isdisjoint(kept):
        text += (
            f"Make them a unit of their own, before the fully_shard of any module around them: "
            f"fully_shard([{', '.join(map(_access, kept))}], reshard_after_forward=False). "
        )
    raise ValueError(f"{text}To convert all: {function}(..., keep_fp32_only=[])")


def _access(name: str) -> str:
    """The Python expression for a module of the variable `model`: model.blocks[0].norm."""
    parts = name.split(".") if name else []
    return "model" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts)


def refuse_sharded(model: nn.Module, what: str) -> None:
    """Raises ValueError where a model has a DTensor or is a module of fully_shard."""
    for name, module in model.named_modules():
        own = [*module._parameters.values(), *module._buffers.values()]
        if hasattr(module, "_get_fsdp_state") or any(map(is_dtensor, own)):
            raise ValueError(f"model{name and '.' + name} is sharded: {what}")
