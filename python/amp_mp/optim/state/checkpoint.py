"""Reads and writes state dicts: precision kept, formats converted, torch.optim's understood."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_mp.dtypes import LOW_PRECISION
from amp_mp.optim.rule import Group, Rule
from amp_mp.optim.state.check_loadable import check_loadable
from amp_mp.optim.state.formats import (
    DTYPES,
    MASTER_ENTRIES,
    REST_FORMATS,
    beside,
    format_of,
    get,
    native_name,
    new_state,
    put,
    same_layout,
)
from amp_mp.optim.state.init import CLOCK
from amp_mp.optim.state.masters import master_of, set_master


def restore_state(
    optimizer: Optimizer,
    rules: Iterable[Rule],
    formats: tuple[str, ...],
    state_dict: dict[str, Any],
    load: Callable[[dict[str, Any]], None],
) -> None:
    """Runs torch's `load`, with the saved states in their own precision where torch rounds them.

    The user's pre-hooks come before the checks, which change nothing, and the user's post-hooks
    after everything: they see the final state. formats: the group's entries that say how something
    is stored; they stay the optimizer's.
    """
    final: dict[str, Any] = {}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    before = dict(optimizer.state)
    own = [{name: g[name] for name in formats} for g in optimizer.param_groups]

    def capture(_: Any, seen: dict[str, Any]) -> None:
        check_loadable(seen, params, rules)
        final.update(seen)

    def restore(_: Any) -> None:
        index = 0
        groups = zip(optimizer.param_groups, final["param_groups"], own, strict=True)
        for group, saved_group, stored in groups:
            group.update(stored)  # the file's entries say how the file stores
            for param, saved_id in zip(group["params"], saved_group["params"], strict=True):
                saved = final["state"].get(saved_id)
                if saved is not None:
                    state = _restored(saved, param, saved_group, group, index)
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
    saved: dict[str, Any], param: Tensor, saved_group: Group, group: Group, tensor_index: int
) -> dict[str, Any]:
    """A parameter's state without its master, in the group's formats; no tensor is shared."""
    state: dict[str, Any] = {}
    for name, value in saved.items():
        if name in MASTER_ENTRIES or (
            name.endswith("_scale") and name.removesuffix("_scale") in saved
        ):
            continue
        if not isinstance(value, Tensor):
            state[name] = value
        elif name in CLOCK or value.shape != param.shape:
            state[name] = value.detach().to(param.device, copy=True)
        elif value.dtype == torch.float64 or name not in group:
            state[name] = _like(value, param)
        else:
            scale = saved.get(f"{name}_scale")
            found = _saved_format(value, saved_group.get(name))
            wanted = format_of(group[name], param)
            if found == wanted and (scale is None or same_layout(value, param)):
                data = _like(value, param)
                scale = None if scale is None else scale.detach().to(param.device, copy=True)
            else:  # groups are of neighbours in memory, so another layout has other groups
                values = get(value.detach(), scale, native_name(found)).to(param.device)
                data, scale = new_state(wanted, param)
                random = {"seed": int(group["seed"]), "tensor_index": tensor_index}
                put(values, data, scale, native_name(wanted), **random)
            state[name] = data
            if scale is not None:
                state[f"{name}_scale"] = scale
    return state


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
    held = {n: _like(source[n], param) for n in MASTER_ENTRIES if source.get(n) is not None}
    if "master" in held:
        held["master"] = held["master"].float()
    second = beside(param, held)
    if second is not None and {torch.float32: "float32", **REST_FORMATS}[second.dtype] == wanted:
        state.update(held)
    elif held:
        set_master(wanted, param, state, master_of(param, held))


def _like(value: Tensor, param: Tensor) -> Tensor:
    """A copy with the parameter's layout and device, and the value's own dtype."""
    return torch.empty_like(param, dtype=value.dtype).copy_(value.detach())


def _saved_format(value: Tensor, tag: str | None) -> str:
    """The format of a saved tensor: its group's, where the dtype agrees, else the dtype's own.

    They disagree in checkpoints of torch.optim, and where m8 fell back to bfloat16.
    """
    if tag is not None and DTYPES.get(tag) == value.dtype:
        return tag
    plain = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
    return plain.get(value.dtype, "float32")


def torch_state_dict(optimizer: Optimizer, rule: Rule, own: set[str]) -> dict[str, Any]:
    """The state dict of the optimizer in torch.optim with the same name, for float32 weights.

    own: entries of the groups that torch's optimizer does not have.
    """
    packed = optimizer.state_dict()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    ids = [i for group in packed["param_groups"] for i in group["params"]]
    groups = [g for g in optimizer.param_groups for _ in g["params"]]
    state: dict[Any, dict[str, Any]] = {}
    for number, param, group in zip(ids, params, groups, strict=True):
        saved = packed["state"].get(number)
        if saved is None:
            continue
        row = state[number] = {"step": saved["step"].float().cpu()}
        for name in rule.names:
            native = native_name(format_of(group[name], param))
            row[name] = get(saved[name], saved.get(f"{name}_scale"), native)
    kept = [{k: v for k, v in g.items() if k not in own} for g in packed["param_groups"]]
    return {"state": state, "param_groups": kept}
