"""Loads state dicts: states keep the precision that they were saved with, or are converted."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.optim.rule import Group, Rule
from amp_mp.optim.state.check_loadable import NUMBERS, RulesOf, check_loadable
from amp_mp.optim.state.masters import master_of, set_master
from amp_mp.optim.state.saving import own_hook
from amp_mp.optim.state.schema import (
    MASTER,
    MASTER_ENTRIES,
    Entry,
    Schema,
    entry_name,
    scale_name,
    schema_of,
)
from amp_mp.sharding.shards import (
    is_dtensor,
    is_placed_as,
    like,
    local_of,
    part,
    part_of_whole,
    whole,
)

State = dict[str, Any]  # of one parameter, by entry


def load_state(
    optimizer: Optimizer,
    rules: tuple[Rule, ...],
    rules_of: RulesOf,
    group_rules: Callable[[], list[Rule]],
    formats: tuple[str, ...],
    state_dict: dict[str, Any],
    load: Callable[[dict[str, Any]], None],
) -> None:
    """Runs torch's `load` for everything but the parameters' states, which torch would round.

    The user's pre-hooks come before the checks, which change nothing, and the user's post-hooks
    after everything: they see the final state. rules: all of the optimizer's class. group_rules:
    of each group now. formats: the group's entries that say how something is stored; they stay the
    optimizer's. States that the file has as the optimizer stores them are checked and copied
    natively.
    """
    if not isinstance(state_dict, dict):
        raise TypeError(f"state_dict must be a dict, found {type(state_dict).__name__}")
    schema = schema_of(rules)
    own_groups = optimizer.param_groups
    params = [p for group in own_groups for p in group["params"]]
    own = [{name: g[name] for name in formats} for g in own_groups]
    before = dict(vars(optimizer), defaults=dict(optimizer.defaults))  # torch adds to them
    made: list[State | None] = []  # of each parameter
    undo: list[tuple[Tensor, Tensor]] = []  # weights that other masters round otherwise, as before

    @torch.no_grad()
    def check(_: Any, found: dict[str, Any]) -> dict[str, Any]:
        _C.check_parts(found, own_groups)
        found = _C.by_names(found, own_groups)
        others, copies = dict(found["state"]), _C.copies_as_stored(group_rules(), own_groups, found)
        check_loadable(found, params, rules, rules_of, copies)
        for group, file in zip(own_groups, found["param_groups"], strict=True):
            stored = {**group, "seed": file.get("seed", optimizer.defaults["seed"])}
            for param, number in zip(group["params"], file["params"], strict=True):
                saved, index = others.pop(number, None), len(made)
                if saved and index not in copies:
                    old = before["state"].get(param, {})
                    saved = _restored(schema, saved, old, param, stored, index, undo)
                made.append(copies.get(index, saved))
        return {**found, "state": others}

    def restore(_: Any) -> None:
        for group, stored in zip(optimizer.param_groups, own, strict=True):
            group.update(stored)  # the file's entries say how the file stores
        for param, state in zip(params, made, strict=True):
            if state is not None:
                optimizer.state[param] = state
        try:
            group_rules()  # settings that all groups have to share
        except ValueError as error:
            raise ValueError(f"state_dict: {error}; nothing was loaded") from None

    before_load = own_hook(optimizer._optimizer_load_state_dict_pre_hooks, check, last=True)
    try:
        with before_load, own_hook(optimizer._optimizer_load_state_dict_post_hooks, restore):
            load(state_dict)
    except BaseException:
        vars(optimizer).update(before)
        for weight, values in undo:
            weight.copy_(values)
        raise


def _restored(
    schema: Schema,
    saved: State,
    old: State,
    param: Tensor,
    group: Group,
    index: int,
    undo: list[tuple[Tensor, Tensor]],
) -> State:
    """A parameter's state as its group stores saved entries, in new tensors and the file's order.

    old: its state until now. index: of the parameter. undo: gets weights that are rounded again.
    """
    state: State = {}
    masters: dict[str, Tensor] = {}
    local = local_of(param)
    for name, value in saved.items():
        entry = schema.entries.get(name)
        if not isinstance(value, Tensor):
            state[name] = value
        elif entry is None and value.shape == param.shape:
            state[name] = like(_C.copy_as(part(value, param), None, local), param)
        elif entry is None or entry.like == "number":
            state[name] = whole(value).to(local.device, copy=True)
        elif entry.state == "master":
            masters[name] = value
        elif entry.like == "row":
            own = part(value, param).to(local.device, torch.float32, copy=True)
            state[name] = like(own, param, tuple(value.shape))
        elif entry.like == "param":
            wanted, seed = group[entry.state], int(group["seed"])
            here = _part_of(entry, saved, param)
            format, data, scale = _C.converted(param, wanted, *here, seed=seed, tensor_index=index)
            kept = entry_name(entry.state, format)
            state[kept] = like(data, param)
            if scale is not None:
                state[scale_name(kept)] = like(scale, param, _C.scale_shape(param))
    if param.dtype not in LOW_PRECISION or not MASTER_ENTRIES.keys().isdisjoint(state):
        masters = {}
    elif not masters:  # a file of torch's: the master stays
        masters = {n: old[n] for n in MASTER_ENTRIES if old.get(n) is not None}
    parts = {name: part(value, param) for name, value in masters.items()}
    found = {n: _C.copy_as(own, MASTER_ENTRIES[n].dtype, local) for n, own in parts.items()}
    wanted_master = MASTER.get((group["master"], param.dtype))
    if wanted_master is not None and [*found] == [wanted_master.name]:
        state.update({name: like(value, param) for name, value in found.items()})
    elif found:  # the parameter changes only where the format of before rounds otherwise
        values = master_of(param, found)
        undo.append((local.detach(), local.detach().clone()))
        set_master(group["master"], param, state, values)
    for name in [name for name in saved if name in state]:
        state[name] = state.pop(name)
    return state


def _part_of(entry: Entry, saved: State, param: Tensor) -> tuple[str, Tensor, Tensor | None]:
    """A saved state's format, data and scales on this process; float32 where it cuts groups."""
    data, format = saved[entry.name], entry.format
    if not entry.scale:
        return format or NUMBERS[data.dtype], part(data, param), None
    scale = saved[entry.scale]
    if not is_dtensor(param):
        return format, whole(data), whole(scale)
    shape, fits = _C.scale_shape(param), _C.has_groups(param)
    placed = is_placed_as(data, param) and is_placed_as(scale, param)
    if fits and placed and tuple(scale.shape) == shape:
        return format, local_of(data), local_of(scale)
    data, scale = whole(data), whole(scale)
    if fits and data.is_contiguous():
        return format, part_of_whole(data, param), part_of_whole(scale.reshape(shape), param)
    return "float32", part_of_whole(_C.decode(data, scale, format), param), None
