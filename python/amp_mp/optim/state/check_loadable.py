"""Whether a state dict can be loaded: every check is made before anything is changed."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from amp_mp.optim.options import check_group
from amp_mp.optim.rule import Group, Rule, kinds_of, missing_states
from amp_mp.optim.state.entries import (
    OLD_REMAINDERS,
    as_integers,
    has_bits,
    held_twice,
    scales_of,
    state_of,
)
from amp_mp.optim.state.formats import (
    CODES,
    DTYPES,
    GROUP,
    KINDS,
    MASTER_ENTRIES,
    NATIVE_FORMATS,
    is_grouped,
    rest_dtype,
    scale_name,
)
from amp_mp.optim.state.init import CLOCK
from amp_mp.optim.state.old_codes import stored_like
from amp_mp.sharding.shards import is_dtensor, local_of, other_rank

PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_loadable(
    state_dict: dict[str, Any],
    params: list[Tensor],
    rules: Iterable[Rule],
    rules_of: Callable[[Group], Iterable[Rule]],
) -> None:
    """Raises ValueError naming the entry that is missing or cannot be used, and its parameter.

    rules: all of the optimizer's class. rules_of: those that a param_group may have. torch compares
    the numbers of groups and parameters itself.
    """
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
            (name, "is missing, though it has taken steps")
            for name in missing_states(rules_of(group), state)
        ]
        named += [(n, _wrong(n, value, state, group, param, kinds)) for n, value in state.items()]
        for name in kinds:
            twice = held_twice(state, name)
            named += [(twice[0], f"is there as {twice[1]!r}, too")] if twice else []
        for name, wrong in named:
            if wrong:
                what = f"state_dict: {name!r} of parameter {position}"
                raise ValueError(f"{what} {wrong}; nothing was loaded")


def _wrong(
    entry: str,
    value: Any,
    state: dict[str, Any],
    group: Group,
    param: Tensor,
    kinds: dict[str, str],
) -> str:
    """What is wrong with one entry of a parameter's saved state, in words; empty if nothing."""
    name = state_of(entry, kinds)
    known = (*MASTER_ENTRIES, *OLD_REMAINDERS, "beta_powers")
    if not isinstance(value, Tensor):
        needed = value is not None and (name is not None or entry in known)
        return f"is no tensor: {value!r}" if needed else ""
    if (rank := other_rank(value)) is not None:
        return (
            f"is the part of rank {rank}, which has saved it; load on each rank the file that the "
            "same rank has saved, or use amp_mp.checkpoint, which takes any number of ranks"
        )
    shape, dtype = tuple(value.shape), value.dtype
    if entry in CLOCK:
        fits = shape == (2,) if entry == "beta_powers" else value.numel() == 1
        wanted = "two numbers" if entry == "beta_powers" else "one number"
        return "" if fits and not dtype.is_complex else f"has shape {shape}, must be {wanted}"
    for each in kinds:
        if entry in (scale_name(each), *scales_of(each)):
            return _wrong_scale(entry, value, state, str(group.get(each)), param)
    if shape != tuple(param.shape):
        wrong = f"has shape {shape}, but the parameter has shape {tuple(param.shape)}"
        if is_dtensor(param) and shape == tuple(local_of(param).shape):
            wrong += ": it is one process's part as a plain tensor; load DTensors or whole tensors"
        return wrong
    if entry in MASTER_ENTRIES or entry in OLD_REMAINDERS:
        return _wrong_master(entry, as_integers(value).dtype if has_bits(entry) else dtype)
    return "" if name is None else _wrong_state(entry, name, value, state, group, kinds[name])


def _wrong_master(entry: str, dtype: torch.dtype) -> str:
    """What is wrong with the dtype of a master or of remainders, in words; empty if nothing."""
    if entry == "master":
        return "" if dtype in PLAIN else f"has dtype {dtype}, must be floating-point"
    wanted = [torch.int16, torch.int8] if entry in OLD_REMAINDERS else [rest_dtype(entry)]
    if dtype in wanted:
        return ""
    return f"has dtype {dtype}, must be {' or '.join(map(str, wanted))}"


def _wrong_state(
    entry: str, name: str, value: Tensor, state: dict[str, Any], group: Group, kind: str
) -> str:
    """What is wrong with a state's dtype and scales, in words; empty if nothing."""
    coded = CODES.get(entry.removeprefix(name))
    dtype = as_integers(value).dtype if has_bits(entry) else value.dtype
    if coded is None:
        format = str(group.get(name))  # says what codes are, in files without names for them
        if dtype in PLAIN:
            return ""
        if kind == "exact" or DTYPES.get(format) != dtype:
            return f"has dtype {dtype}, but its param_group says that it is stored as {format!r}"
    else:
        format = stored_like(coded)
        if format not in KINDS[kind]:
            return f"is stored as {format!r}, but can be {', '.join(KINDS[kind])} only"
        if DTYPES[format] != dtype:
            return f"has dtype {dtype}, but {format!r} is stored as {DTYPES[format]}"
    if is_grouped(format) and state.get(scale_name(entry)) is None:
        return f"is stored as {format!r}, but has no {scale_name(entry)!r}"
    return ""


def _wrong_scale(entry: str, value: Tensor, state: dict[str, Any], tag: str, param: Tensor) -> str:
    """What is wrong with the scales of a state, in words; empty if nothing.

    tag: the format that the file's param_group names, for files without names for codes.
    """
    data = entry.removesuffix("_scale")
    format = next((f for suffix, f in CODES.items() if data.endswith(suffix)), tag)
    rest = NATIVE_FORMATS[stored_like(format)]["rest_dtype"] if format in DTYPES else None
    count = param.numel() // GROUP
    if rest is None or (value.dtype == rest and value.numel() == count):
        return ""
    return f"has {value.numel()} elements of {value.dtype}, must have {count} of {rest}"
