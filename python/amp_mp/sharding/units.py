"""The units of fully_shard in a model, and whether FSDP2 has fixed their dtypes already."""

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from amp_mp.sharding.shards import is_dtensor
from amp_mp.torch_private import fsdp_groups


def units_of(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Each unit of fully_shard once: the module's name as an attribute, FSDP's state and group."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        get_state = getattr(module, "_get_fsdp_state", None)
        if get_state is None:
            continue
        state = get_state()
        for group in fsdp_groups(state):
            if id(group) not in seen:
                seen.add(id(group))
                yield name and "." + name, state, group


def check_open(function: str, model: nn.Module, targets: Collection[int]) -> list[tuple[str, Any]]:
    """The units, by name and group, that have parameters among `targets`, tensors' ids.

    ValueError where FSDP2 does not let `function` change dtypes any more, or the model lacks the
    module of a parameter's unit.
    """
    owned: set[int] = set()
    found = []
    for name, state, group in units_of(model):
        owned |= {id(p.sharded_param) for p in group.fsdp_params}
        infos = [p._module_info for p in group.fsdp_params]
        if not any(id(getattr(i.module, i.param_name)) in targets for i in infos):
            continue
        if state._is_root is not None or group._reset_sharded_params:
            now = "" if group.is_sharded else ", and its parameters are gathered now"
            raise ValueError(
                f"model{name} has run a forward or unshard(){now}. fully_shard fixes the dtypes of "
                f"its communication there; call {function} before, right after fully_shard"
            )
        found.append((name, group))
    for name, module in model.named_modules():
        managed = getattr(module, "_is_fsdp_managed_module", False)
        for key, param in module.named_parameters(recurse=False):
            if managed and id(param) in targets and is_dtensor(param) and id(param) not in owned:
                raise ValueError(
                    f"model.{name + '.' if name else ''}{key} belongs to a fully_shard unit "
                    f"that is not in the given model; call {function} with the whole model, once"
                )
    return found
