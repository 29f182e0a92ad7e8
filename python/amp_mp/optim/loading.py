"""State dicts in and out: widths kept, formats converted, torch.optim's read and written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp_mp.optim.originals import LOW_PRECISION, rounded
from amp_mp.optim.state import CLOCK, master_of, set_master
from amp_mp.optim.storage import (
    REST_FORMATS,
    format_of,
    get,
    native_name,
    new_state,
    put,
)

if TYPE_CHECKING:
    from amp_mp.optim.base import FusedOptimizer


def restore_state(
    optimizer: FusedOptimizer, state_dict: dict[str, Any], load: Callable[[dict[str, Any]], None]
) -> None:
    """Runs torch's `load` and puts the saved states back at their own width."""
    final: dict[str, Any] = {}

    def capture(_: Any, seen: dict[str, Any]) -> None:
        final.update(seen)  # after the user's own pre-hooks

    params = [p for group in optimizer.param_groups for p in group["params"]]
    _check_loadable(state_dict, params)
    before = dict(optimizer.state)
    own = [{n: g[n] for n in optimizer._chosen} for g in optimizer.param_groups]
    handle = optimizer.register_load_state_dict_pre_hook(capture)
    try:
        load(state_dict)
    finally:
        handle.remove()
    number = 0
    groups = zip(optimizer.param_groups, final["param_groups"], own, strict=True)
    for group, saved_group, formats in groups:
        group.update(formats)  # the file says how it stores, not how this optimizer does
        for param, saved_id in zip(group["params"], saved_group["params"], strict=True):
            saved = final["state"].get(saved_id)
            if saved is not None:
                state = _restored(saved, param, saved_group, group, number)
                _keep_master(state, before.get(param, {}), param)
                optimizer.state[param] = state
            number += 1


def _restored(
    saved: dict[str, Any],
    param: Tensor,
    saved_group: dict[str, Any],
    group: dict[str, Any],
    number: int,
) -> dict[str, Any]:
    """One parameter's state in the group's formats, sharing nothing with the saved one."""
    state: dict[str, Any] = {}
    masters = ("master", "remainder")
    for name, value in saved.items():
        if name in masters or (name.endswith("_scale") and name[: -len("_scale")] in saved):
            continue
        if not isinstance(value, Tensor):
            state[name] = value
        elif name in CLOCK or value.shape != param.shape:
            state[name] = value.detach().to(param.device, copy=True)
        elif value.dtype == torch.float64 or name not in group:
            state[name] = _like(value, param)
        else:
            found = _saved_format(value, saved_group.get(name, "float32"))
            scale = saved.get(f"{name}_scale")
            wanted = format_of(group[name], param)
            if found == wanted:
                state[name] = _like(value, param)
                if scale is not None:
                    state[f"{name}_scale"] = scale.detach().to(param.device, copy=True)
                continue
            values = get(_like(value, param), _moved(scale, param), native_name(found))
            state[name], new_scale = new_state(wanted, param)
            random = {"seed": int(group["seed"]), "number": number}
            put(values, state[name], new_scale, native_name(wanted), **random)
            if new_scale is not None:
                state[f"{name}_scale"] = new_scale
    if param.dtype in LOW_PRECISION:
        _restore_master(saved, param, state, group["master"])
    elif "master" in saved:
        state["master"] = _like(saved["master"], param)
    return state


def _restore_master(
    saved: dict[str, Any], param: Tensor, state: dict[str, Any], wanted: str
) -> None:
    rest, master = saved.get("remainder"), saved.get("master")
    if rest is not None and REST_FORMATS[rest.dtype] == wanted:
        state["remainder"] = _like(rest, param)
    elif rest is not None:
        set_master(wanted, param, state, master_of(param, {"remainder": _like(rest, param)}))
    elif master is not None:
        set_master(wanted, param, state, _like(master.float(), param))


def _keep_master(state: dict[str, Any], before: dict[str, Any], param: Tensor) -> None:
    """Where the file has no master: the one there is, if it still is the weight's."""
    if param.dtype not in LOW_PRECISION or "master" in state or "remainder" in state:
        return
    master = before.get("master")
    if master is not None and torch.equal(rounded(master, param.dtype), param.detach()):
        state["master"] = master
    elif before.get("remainder") is not None:
        state["remainder"] = before["remainder"]


def _moved(tensor: Tensor | None, param: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(param.device)


def _like(value: Tensor, param: Tensor) -> Tensor:
    """A copy in the parameter's layout and place, of the value's own dtype."""
    like = torch.empty_like(param, dtype=value.dtype, memory_format=torch.preserve_format)
    return like.copy_(value.detach())


def _saved_format(value: Tensor, tag: str) -> str:
    """What a saved tensor is: its dtype says it, but for the two that are float16."""
    if value.dtype == torch.float16:
        return tag if tag == "float16_root" else "float16"
    return {torch.int8: "m8", torch.int16: "ue8m8", torch.bfloat16: "bfloat16"}.get(
        value.dtype, "float32"
    )


def _check_loadable(state_dict: dict[str, Any], params: list[Tensor]) -> None:
    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    for position, (number, param) in enumerate(zip(ids, params, strict=False)):
        for name, value in state_dict["state"].get(number, {}).items():
            if not isinstance(value, Tensor) or name in CLOCK or name.endswith("_scale"):
                continue
            if value.shape != param.shape:
                raise ValueError(
                    f"state_dict: {name!r} of parameter {position} has shape "
                    f"{tuple(value.shape)}, but the parameter has shape {tuple(param.shape)}; "
                    "nothing was loaded"
                )


def torch_state_dict(optimizer: FusedOptimizer) -> dict[str, Any]:
    """See FusedOptimizer.torch_state_dict."""
    packed = optimizer.state_dict()
    own = {*optimizer._chosen, "rounding", "seed"}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    ids = [i for group in packed["param_groups"] for i in group["params"]]
    groups = [g for g in optimizer.param_groups for _ in g["params"]]
    state: dict[Any, dict[str, Any]] = {}
    for number, param, group in zip(ids, params, groups, strict=True):
        if number not in packed["state"]:
            continue
        saved = packed["state"][number]
        row = state[number] = {"step": saved["step"].float().cpu()}
        for name in optimizer._states():
            native = native_name(format_of(group[name], param))
            row[name] = get(saved[name], saved.get(f"{name}_scale"), native)
    kept = [{k: v for k, v in g.items() if k not in own} for g in packed["param_groups"]]
    return {"state": state, "param_groups": kept}
