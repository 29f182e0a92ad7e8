"""Reads and writes state dicts: precision kept, formats converted, torch.optim's understood."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_mp.dtypes import LOW_PRECISION
from amp_mp.optim.rule import Group, Rule, kinds_of
from amp_mp.optim.state.check_loadable import check_loadable
from amp_mp.optim.state.entries import (
    Held,
    held,
    held_here,
    renamed,
    state_of,
    store,
    with_bits,
)
from amp_mp.optim.state.formats import (
    DTYPES,
    MASTER_ENTRIES,
    REST_FORMATS,
    beside,
    format_of,
    get,
    native_name,
    same_layout,
    scale_shape,
)
from amp_mp.optim.state.init import CLOCK
from amp_mp.optim.state.masters import master_of, set_master
from amp_mp.optim.state.parts import part, part_of_state, stored_anew, whole
from amp_mp.sharding.shards import like, local_of


def shown_state(optimizer: Optimizer, show: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """torch's state dict, from `show`, with 16-bit integers as bfloat16 numbers of equal bits.

    The tensors share the state's memory, as torch's do. The user's post-hooks see them so.
    """

    def as_bits(_: Any, found: dict[str, Any]) -> None:
        found["state"] = {param: with_bits(state) for param, state in found["state"].items()}

    hook = optimizer.register_state_dict_post_hook(as_bits, prepend=True)
    try:
        return show()
    finally:
        hook.remove()


def rename_states(optimizer: Optimizer) -> None:
    """Gives the states of an optimizer that was pickled long ago the names of today."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param)
            if state:
                found = renamed(state, group)
                state.clear()
                state.update(found)


def restore_state(
    optimizer: Optimizer,
    rules: Iterable[Rule],
    rules_of: Callable[[Group], Iterable[Rule]],
    formats: tuple[str, ...],
    state_dict: dict[str, Any],
    load: Callable[[dict[str, Any]], None],
) -> None:
    """Runs torch's `load`, with the saved states in their own precision where torch rounds them.

    The user's pre-hooks come before the checks, which change nothing, and the user's post-hooks
    after everything: they see the final state. rules, rules_of: as check_loadable has them.
    formats: the group's entries that say how something is stored; they stay the optimizer's.
    """
    rules = tuple(rules)
    names = tuple(kinds_of(rules))
    final: dict[str, Any] = {}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    before = dict(optimizer.state)
    own = [{name: g[name] for name in formats} for g in optimizer.param_groups]

    def capture(_: Any, seen: dict[str, Any]) -> None:
        check_loadable(seen, params, rules, rules_of)
        final.update(seen)

    def restore(_: Any) -> None:
        index = 0
        groups = zip(optimizer.param_groups, final["param_groups"], own, strict=True)
        for group, saved_group, stored in groups:
            group.update(stored)  # the file's entries say how the file stores
            for param, saved_id in zip(group["params"], saved_group["params"], strict=True):
                saved = final["state"].get(saved_id)
                if saved is not None:
                    saved = renamed(saved, saved_group)
                    state = _restored(saved, param, names, group, index)
                    _restore_master(saved, before.get(param, {}), param, state, group["master"])
                    optimizer.state[param] = state
                index += 1

    hooks = [
        optimizer.register_load_state_dict_pre_hook(capture),
        optimizer.register_load_state_dict_post_hook(restore, prepend=True),
    ]
    try:
        load(state_dict)
    finally:
        for hook in hooks:
            hook.remove()


def _restored(
    saved: dict[str, Any], param: Tensor, names: tuple[str, ...], group: Group, tensor_index: int
) -> dict[str, Any]:
    """A parameter's state without its master, in the group's formats; no tensor is shared.

    names: of the states.
    """
    state: dict[str, Any] = {}
    for entry, value in saved.items():
        scales = entry.endswith("_scale") and entry.removesuffix("_scale") in saved
        if entry in MASTER_ENTRIES or scales:
            continue
        name = state_of(entry, names)
        found = None if name is None else held(saved, name)
        if not isinstance(value, Tensor):
            state[entry] = value
        elif entry in CLOCK or value.shape != param.shape:
            state[entry] = whole(value).to(local_of(param).device, copy=True)
        elif name is None or found is None:
            state[entry] = like(_copied(part(value, param), param), param)
        else:
            store(state, name, param, *_converted(found, param, group[name], group, tensor_index))
    return state


def _converted(
    found: Held, param: Tensor, declared: str, group: Group, tensor_index: int
) -> tuple[str, Tensor, Tensor | None]:
    """The format, data and scales of a saved state as the parameter's group stores it; copies.

    Of a DTensor the parts on this process, as plain tensors.
    """
    if found.format not in DTYPES:  # float64 of torch's
        found = found._replace(format="float32", data=found.data.float())
    found = part_of_state(found, param)
    wanted, local = format_of(declared, param), local_of(param)
    if found.format == wanted and (found.scale is None or same_layout(found.data, local)):
        data, scale = _copied(found.data, param), found.scale
        if scale is not None:
            shape = scale_shape(param, tuple(local.shape))
            scale = scale.detach().to(local.device, copy=True).reshape(shape)
    else:  # groups are of neighbours in memory, so another layout has other groups
        random = {"seed": int(group["seed"]), "tensor_index": tensor_index}
        data, scale = stored_anew(found, wanted, param, **random)
    return wanted, data, scale


def _restore_master(
    saved: dict[str, Any], before: dict[str, Any], param: Tensor, state: dict[str, Any], wanted: str
) -> None:
    """Puts the saved master into the state, as `wanted` says it is stored.

    Where the file has none, the one of the state before stays. The parameter changes only where
    the master is converted to a format that rounds otherwise.
    """
    if param.dtype not in LOW_PRECISION:
        return
    names = [name for name in MASTER_ENTRIES if saved.get(name) is not None]
    source = saved if names else before
    there = [name for name in MASTER_ENTRIES if source.get(name) is not None]
    found = {name: _copied(part(source[name], param), param) for name in there}
    if "master" in found:
        found["master"] = found["master"].float()
    second = beside(param, found)
    if second is not None and {torch.float32: "float32", **REST_FORMATS}[second.dtype] == wanted:
        state.update({name: like(value, param) for name, value in found.items()})
    elif found:
        set_master(wanted, param, state, master_of(param, found))


def _copied(value: Tensor, param: Tensor) -> Tensor:
    """A copy with the layout and device of the parameter here, and the value's own dtype."""
    return torch.empty_like(local_of(param), dtype=value.dtype).copy_(value.detach())


def torch_state_dict(optimizer: Optimizer, rules: list[Rule], own: set[str]) -> dict[str, Any]:
    """The state dict of the optimizer in torch.optim with the same name, for float32 weights.

    rules: of each param_group. own: entries of the groups that torch's optimizer does not have.
    """
    packed = optimizer.state_dict()
    pairs = zip(optimizer.param_groups, rules, strict=True)
    params = [(p, rule) for group, rule in pairs for p in group["params"]]
    ids = [i for group in packed["param_groups"] for i in group["params"]]
    state: dict[Any, dict[str, Any]] = {}
    for number, (param, rule) in zip(ids, params, strict=True):
        saved = optimizer.state.get(param)
        if not saved:
            continue
        clock = {"step": saved["step"]}
        if rule.own is not None:
            clock[rule.own.name] = saved.get(rule.own.name, rule.own.start)
        row = {name: torch.tensor(float(n), dtype=torch.float32) for name, n in clock.items()}
        state[number] = row
        for name in rule.names:
            found = held_here(saved, name)
            if found is not None:
                row[name] = like(get(found.data, found.scale, native_name(found.format)), param)
    kept = [{k: v for k, v in g.items() if k not in own} for g in packed["param_groups"]]
    return {"state": state, "param_groups": kept}
