"""Reads and writes state dicts: precision kept, formats converted, torch.optim's understood."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_mp.dtypes import LOW_PRECISION, rounded
from amp_mp.optim.rule import Group, Rule
from amp_mp.optim.state.check_loadable import check_loadable
from amp_mp.optim.state.formats import (
    DTYPES,
    REST_FORMATS,
    format_of,
    get,
    native_name,
    new_state,
    put,
)
from amp_mp.optim.state.init import CLOCK
from amp_mp.optim.state.masters import master_of, set_master

MASTERS = ("master", "remainder")


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
        if name in MASTERS or (name.endswith("_scale") and name.removesuffix("_scale") in saved):
            continue
        if not isinstance(value, Tensor):
            state[name] = value
        elif name in CLOCK or value.shape != param.shape:
            state[name] = value.detach().to(param.device, copy=True)
        elif value.dtype == torch.float64 or name not in group:
            state[name] = _like(value, param)
        else:
            data, scale = _like(value, param), saved.get(f"{name}_scale")
            if scale is not None:
                scale = scale.detach().to(param.device, copy=True)
            found, wanted = (
                _saved_format(value, saved_group.get(name)),
                format_of(group[name], param),
            )
            if found != wanted:
                values = get(data, scale, native_name(found))
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

    Where the file has none, the one of the state before stays if it still rounds to the weight.
    """
    rest, master = saved.get("remainder"), saved.get("master")
    if param.dtype not in LOW_PRECISION:
        if master is not None:
            state["master"] = _like(master, param)
        return
    if rest is not None:
        rest = _like(rest, param)
        if REST_FORMATS[rest.dtype] == wanted:
            state["remainder"] = rest
        else:
            set_master(wanted, param, state, master_of(param, {"remainder": rest}))
    elif master is not None:
        set_master(wanted, param, state, _like(master.float(), param))
    if "master" in state or "remainder" in state:
        return
    master, rest = before.get("master"), before.get("remainder")
    if master is not None and torch.equal(rounded(master, param.dtype), param.detach()):
        state["master"] = master
    elif rest is not None:
        state["remainder"] = rest


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
