"""Whether a state dict can be loaded: every check is made before anything is changed."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from amp_mp.optim.options import check_group
from amp_mp.optim.rule import Group, Rule, kinds_of, missing_states
from amp_mp.optim.state.formats import DTYPES, GROUP, NATIVE_FORMATS, REST_FORMATS
from amp_mp.optim.state.init import CLOCK

PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_loadable(state_dict: dict[str, Any], params: list[Tensor], rules: Iterable[Rule]) -> None:
    """Raises ValueError naming the entry that is missing or cannot be used, and its parameter.

    rules: all of the optimizer's class. torch compares the numbers of groups and parameters itself.
    """
    rules = tuple(rules)
    kinds = kinds_of(rules)
    lacking = [name for name in ("state", "param_groups") if name not in state_dict]
    if lacking:
        raise ValueError(f"state_dict: {lacking} missing; nothing was loaded")
    for index, group in enumerate(state_dict["param_groups"]):
        try:
            check_group(group)
        except ValueError as error:
            message = f"state_dict: param_group {index}: {error}; nothing was loaded"
            raise ValueError(message) from None
    saved = [(i, group) for group in state_dict["param_groups"] for i in group["params"]]
    for position, ((number, group), param) in enumerate(zip(saved, params, strict=False)):
        state = state_dict["state"].get(number, {})
        named = [
            (name, "is missing, though it has taken steps") for name in missing_states(rules, state)
        ]
        named += [(n, _wrong(n, value, state, group, param, kinds)) for n, value in state.items()]
        for name, wrong in named:
            if wrong:
                what = f"state_dict: {name!r} of parameter {position}"
                raise ValueError(f"{what} {wrong}; nothing was loaded")


def _wrong(
    name: str,
    value: Any,
    state: dict[str, Any],
    group: Group,
    param: Tensor,
    kinds: dict[str, str],
) -> str:
    """What is wrong with one entry of a parameter's saved state, in words; empty if nothing."""
    if not isinstance(value, Tensor):
        known = name in kinds or name in ("master", "remainder", "beta_powers")
        return f"is no tensor: {value!r}" if known and value is not None else ""
    shape, dtype = tuple(value.shape), value.dtype
    if name in CLOCK:
        fits = value.numel() == 1 if name != "beta_powers" else shape == (2,)
        wanted = "two numbers" if name == "beta_powers" else "one number"
        return "" if fits and not dtype.is_complex else f"has shape {shape}, must be {wanted}"
    if name.endswith("_scale") and name.removesuffix("_scale") in kinds:
        return _wrong_scale(value, str(group.get(name.removesuffix("_scale"))), param)
    if shape != tuple(param.shape):
        return f"has shape {shape}, but the parameter has shape {tuple(param.shape)}"
    if name == "remainder" and dtype not in REST_FORMATS:
        return f"has dtype {dtype}, must be one of {', '.join(map(str, REST_FORMATS))}"
    if name == "master" and dtype not in PLAIN:
        return f"has dtype {dtype}, must be floating-point"
    if name not in kinds or dtype in PLAIN:
        return ""
    format = str(group.get(name))
    if kinds[name] == "exact" or DTYPES.get(format) != dtype:
        return f"has dtype {dtype}, but its param_group says that it is stored as {format!r}"
    if NATIVE_FORMATS[format]["rest_dtype"] is not None and state.get(f"{name}_scale") is None:
        return f"is stored as {format!r}, but has no '{name}_scale'"
    return ""


def _wrong_scale(value: Tensor, format: str, param: Tensor) -> str:
    """What is wrong with the scales of a state of a format, in words; empty if nothing."""
    rest = NATIVE_FORMATS[format]["rest_dtype"] if format in DTYPES else None
    count = param.numel() // GROUP
    if rest is None or (value.dtype == rest and value.numel() == count):
        return ""
    return f"has {value.numel()} elements of {value.dtype}, must have {count} of {rest}"
