"""Reads a checkpoint into a model and an optimizer that may be stored and split otherwise."""

from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_mp.checkpoint.contents import Contents
from amp_mp.checkpoint.groups import saved_groups
from amp_mp.checkpoint.names import named_params, names_of_groups
from amp_mp.checkpoint.save import is_distributed
from amp_mp.checkpoint.templates import model_template, state_template
from amp_mp.dtypes import LOW_PRECISION, rounded
from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.state.check_loadable import check_loadable
from amp_mp.optim.state.entries import renamed
from amp_mp.optim.state.formats import CODES, MASTER_ENTRIES
from amp_mp.optim.state.masters import master_of, set_master
from amp_mp.optim.state.original_values import awaits_original, keep_original
from amp_mp.sharding.shards import like, local_of


@torch.no_grad()
def load(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """Reads what `save`, or torch.distributed.checkpoint, wrote; on any number of processes.

        found = amp.checkpoint.load("step_1000", model, optimizer, scheduler=scheduler)
        step = found["step"]

    Weights and states of any of amp_mp's formats are read into any other. Of a file of
    torch.optim.AdamW and the like, float32 weights become the masters of low-precision parameters
    and their rounded values the parameters; the step count and the moments go on.

    Args:
        path: the directory.
        model, optimizer: as for `save`, in their own dtypes, formats and shards.
        strict: True raises ValueError where the model or the optimizer has a tensor that the file
            lacks, or the other way round. False leaves out what only one of them has.
        more: objects with load_state_dict (schedulers, scalers), by the names they were saved with.

    Returns what else is in the file, by name; state dicts of the objects in `more` too.
    Raises FileNotFoundError where there is no complete checkpoint, and ValueError naming the entry
    that is missing or of another shape; nothing is changed then.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    params = named_params(model)
    contents = Contents(path, params)
    groups = [] if optimizer is None else names_of_groups(model, optimizer)
    targets = get_model_state_dict(model)
    weights, states = model_template(contents, targets, strict), {}
    for name, param in params.items():
        steps = any(name in group for group in groups)
        states[name] = state_template(contents, name, param, all_entries=steps)
    others = {key: _empty(contents, key) for key in contents.keys_of_more()}
    lacking = sorted(more.keys() - contents.parts())
    if lacking:
        raise ValueError(
            f"{path} has no part named {lacking[0]!r}; it has {', '.join(sorted(contents.parts()))}"
        )
    settings = dict.fromkeys(contents.keys_of_groups()) if groups else {}
    values: dict[str, Any] = {key: value for each in states.values() for key, value in each.items()}
    values |= weights | others | settings
    state_dict_loader.load(values, checkpoint_id=path, no_dist=not is_distributed())

    found = {
        name: {contents.entry_of(key): values[key] for key in own} for name, own in states.items()
    }
    masters = {
        name: master
        for name, param in params.items()
        if (master := _master(param, values.get(f"{contents.model}{name}"), found[name]))
        is not None
    }
    packed = None
    if optimizer is not None:
        kept = {
            name: {k: v for k, v in own.items() if name not in masters or k not in MASTER_ENTRIES}
            for name, own in found.items()
        }
        packed = saved_groups(contents, values, groups, kept, strict)
        check(optimizer, packed)
    for name, target in targets.items():
        source = values.get(f"{contents.model}{name}")
        if source is not None:
            _copy(target, masters.get(name, source))
    if optimizer is not None and packed is not None:
        optimizer.load_state_dict(packed)
    _set_masters(params, optimizer, masters)
    if isinstance(optimizer, FusedOptimizer):
        optimizer.init_state()  # torch's files lack what amp_mp keeps beside the step count
    rest = contents.nested({key: values[key] for key in others})
    for name, each in more.items():
        each.load_state_dict(rest[name])
    return rest


def check(optimizer: Optimizer, packed: dict[str, Any]) -> None:
    """Raises ValueError, before anything is changed, where the optimizer cannot load the state."""
    if isinstance(optimizer, FusedOptimizer):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        check_loadable(packed, params, optimizer.rules)
        return
    for state in packed["state"].values():
        codes = [n for n in state if n in MASTER_ENTRIES or n.endswith(tuple(CODES))]
        if codes:
            raise ValueError(
                f"the checkpoint has {codes[0]!r}, which {type(optimizer).__name__} does not know; "
                "load it into an optimizer of amp_mp"
            )


def _master(param: Tensor, weight: Tensor | None, state: dict[str, Any]) -> Tensor | None:
    """The float32 values of a weight that the file has in another dtype; None for the same dtype.

    This process's shard.
    """
    if weight is None or weight.dtype == param.dtype:
        return None
    local = local_of(weight)
    if weight.dtype in LOW_PRECISION:
        held = {entry: local_of(value) for entry, value in renamed(state, {}).items()}
        values = master_of(local, {k: v for k, v in held.items() if k in MASTER_ENTRIES})
        return local.float() if values is None else values
    return local.float()


def _copy(target: Any, source: Tensor) -> None:
    to, values = local_of(target), local_of(source)
    to.copy_(rounded(values, to.dtype) if to.dtype in LOW_PRECISION else values)


def _set_masters(
    params: dict[str, Tensor], optimizer: Optimizer | None, masters: dict[str, Tensor]
) -> None:
    """Gives low-precision parameters the masters that the file had in float32."""
    fused = optimizer if isinstance(optimizer, FusedOptimizer) else None
    groups = [] if fused is None else fused.param_groups
    owner = {param: group for group in groups for param in group["params"]}
    for name, values in masters.items():
        param = params[name]
        if param.dtype not in LOW_PRECISION:
            continue
        group = owner.get(param)
        if group is not None and fused is not None and param in fused.state:
            set_master(group["master"], param, fused.state[param], like(values, param))
        elif awaits_original(param):
            keep_original(param, like(values, param))


def _empty(contents: Contents, key: str) -> Tensor | None:
    entry = contents.tensors.get(key)
    return None if entry is None else torch.empty(entry.shape, dtype=entry.dtype)
