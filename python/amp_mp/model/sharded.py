"""Sharded models while they are converted or copied: what FSDP2 allows, and when."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from amp_mp.sharding.units import check_open, units_of
from amp_mp.torch_private import composable_keys, has_sharded_modules


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


def reshard(model: nn.Module) -> None:
    """Has FSDP2 put the shards back in the place of parameters that it has gathered.

    Those of the root stay gathered after a forward. A model without them is left as it is.
    """
    if has_sharded_modules():
        for module in model.modules():
            if hasattr(module, "_get_fsdp_state"):
                module.reshard()  # type: ignore[operator]


def copy_of(model: nn.Module) -> nn.Module:
    """A deepcopy of a model, whose shards stay shards of the same processes.

    torch copies no module of fully_shard. The copy of one has the class that it had before, no
    hooks of FSDP2, and raises RuntimeError in forward, where nothing would gather its shards.
    """
    reshard(model)
    own = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    memo: dict[int, Any] = {}  # what stays the same object
    for state in [module._get_fsdp_state() for module in own]:  # type: ignore[operator]
        memo[id(state)] = state
    kinds = [type(module) for module in own]
    try:
        for module, kind in zip(own, kinds, strict=True):
            module.__class__ = kind.__bases__[-1]
        made = deepcopy(model, memo)
    finally:
        for module, kind in zip(own, kinds, strict=True):
            module.__class__ = kind
    for module in made.modules() if own else ():
        for name, hooks in vars(module).items():
            if name.endswith("_hooks"):
                for key in [key for key, hook in hooks.items() if _is_of_fsdp(hook)]:
                    del hooks[key]
    for module in own:
        twin = memo[id(module)]
        for name in composable_keys():
            vars(twin).pop(name, None)
        twin.register_forward_pre_hook(_refuse_forward)
    return made


def _is_of_fsdp(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)  # load_state_dict's hooks are wrapped
    return getattr(function, "__module__", "").startswith("torch.distributed.fsdp.")


def _refuse_forward(module: nn.Module, _: Any) -> None:
    raise RuntimeError(
        f"this {type(module).__name__} has the averages of a module of fully_shard, in shards that "
        "no forward gathers; call the model itself inside of `with averaged.swap() as model`"
    )
