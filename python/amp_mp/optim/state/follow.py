"""State that follows its parameter: to another dtype, layout or device."""

from typing import Any

import torch
from torch import Tensor

from amp_mp.dtypes import LOW_PRECISION
from amp_mp.optim.rule import Group, Rule
from amp_mp.optim.state.formats import (
    DTYPES,
    belongs,
    format_of,
    get,
    native_name,
    new_state,
    put,
)


def follow(rule: Rule, group: Group, param: Tensor, state: dict[str, Any]) -> None:
    """Brings a parameter's state to the parameter's present dtype, layout and device.

    A master is dropped where the dtype has changed, so that a new one is made of the parameter.
    Everything else keeps its values.
    """
    held = [name for name in ("master", "remainder", *rule.names) if state.get(name) is not None]
    if param.dtype not in LOW_PRECISION:
        state.pop("master", None)
    rest = state.get("remainder")
    if rest is not None and not belongs(rest, param):
        del state["remainder"]
    for name in held:
        value = state.get(name)
        if value is None or (value.device == param.device and same_layout(value, param)):
            continue
        if f"{name}_scale" in state or name in rule.names[:1]:
            _move_state(name, group, param, state)
        else:
            state[name] = torch.empty_like(param, dtype=value.dtype).copy_(value)


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether elements of equal index have equal offsets in memory; the shapes are equal."""
    pairs = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(x == y for n, x, y in pairs if n > 1)


def _move_state(name: str, group: Group, param: Tensor, state: dict[str, Any]) -> None:
    """Moves a state that may be stored in groups of neighbours, which another layout changes."""
    data, scale = state[name], state.pop(f"{name}_scale", None)
    present = group[name] if DTYPES.get(group[name]) == data.dtype else "bfloat16"  # m8 fell back
    wanted = format_of(group[name], param)
    if present == wanted and (scale is None or same_layout(data, param)):
        state[name] = torch.empty_like(param, dtype=data.dtype).copy_(data)
        scale = None if scale is None else scale.to(param.device)
    else:
        values = get(data, scale, native_name(present)).to(param.device)
        state[name], scale = new_state(wanted, param)
        put(values, state[name], scale, native_name(wanted), seed=int(group["seed"]))
    if scale is not None:
        state[f"{name}_scale"] = scale
