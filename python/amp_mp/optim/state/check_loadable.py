"""Whether a state dict can be loaded: every check is made before anything is changed."""

from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import Tensor

from amp_mp.dtypes import NATIVE
from amp_mp.optim.options import check_group
from amp_mp.optim.rule import Group, Rule
from amp_mp.optim.state.formats import GROUP, short_name
from amp_mp.optim.state.schema import CLOCK, Entry, Schema, required, schema_of
from amp_mp.sharding.shards import is_dtensor, local_of, other_rank

# The formats in which entries with plain names are read, by dtype; torch may have saved float64.
NUMBERS = {dtype: short_name(dtype) for dtype in NATIVE} | {torch.float64: "float32"}

RulesOf = Callable[[Group], Iterable[Rule]]  # those that a param_group of a file may have


def check_loadable(
    state_dict: dict[str, Any],
    params: list[Tensor],
    rules: tuple[Rule, ...],
    rules_of: RulesOf,
    fitting: Container[int] = (),
) -> None:
    """Raises ValueError naming the entry that is missing or cannot be used, and its parameter.

    torch compares the numbers of groups and parameters itself. fitting: parameters whose states
    were looked at already.
    """
    lacking = [name for name in ("state", "param_groups") if name not in state_dict]
    if lacking:
        raise ValueError(f"state_dict: {lacking} missing; nothing was loaded")
    schema, at, what = schema_of(rules), 0, ""
    try:
        for index, group in enumerate(state_dict["param_groups"]):
            what = f"param_group {index}:"
            check_group(group)
        for group in state_dict["param_groups"]:
            needed = required(tuple(rules_of(group)))
            for number in group["params"]:
                state = state_dict["state"].get(number)
                if state and at < len(params) and at not in fitting:
                    _check_state(schema, needed, state, params[at])
                at += 1
    except EntryError as error:
        entry, wrong = error.args
        what = f"{entry!r} of parameter {at} {wrong}"
        raise ValueError(f"state_dict: {what}; nothing was loaded") from None
    except ValueError as error:
        raise ValueError(f"state_dict: {what} {error}; nothing was loaded") from None


class EntryError(Exception):
    """The entry of a parameter's saved state, and what is wrong with it."""


def _check_state(
    schema: Schema, needed: tuple[str, ...], state: dict[str, Any], param: Tensor
) -> None:
    """Raises EntryError for an entry that cannot be loaded. needed: what must be there."""
    shape = param.shape
    held: dict[str, str] = {}  # the entry of each state's data
    for name, value in state.items():
        entry = schema.entries.get(name)
        if isinstance(value, Tensor):
            _check_tensor(entry, name, value, param, shape, schema)
        elif value is None:
            continue
        elif entry is not None and (entry.like != "number" or CLOCK[name] > 1):
            raise EntryError(name, f"is no tensor: {value!r}")
        if entry is None or entry.like != "param":
            continue
        if entry.state in held:
            first, second = sorted((held[entry.state], name), key=len)
            raise EntryError(first, f"is there as {second!r}, too")
        held[entry.state] = name
        if entry.scale and state.get(entry.scale) is None:
            wrong = f"is stored as {entry.format!r}, but has no {entry.scale!r}"
            raise EntryError(name, wrong)
    missing = [name for name in needed if name not in held and state.get(name) is None]
    if missing and float(state.get("step") or 0) > 0:
        raise EntryError(missing[0], "is missing, though it has taken steps")


def _check_tensor(
    entry: Entry | None, name: str, value: Tensor, param: Tensor, shape: torch.Size, schema: Schema
) -> None:
    """Raises EntryError for a tensor of another dtype or shape than its entry has."""
    if type(value) is not Tensor and (rank := other_rank(value)) is not None:
        raise EntryError(
            name,
            f"is the part of rank {rank}, which has saved it; load on each rank the file that the "
            "same rank has saved, or use amp_mp.checkpoint, which takes any number of ranks",
        )
    if entry is not None and entry.like == "number":
        fits = value.shape == (2,) if CLOCK[name] == 2 else value.numel() == 1
        if not fits or value.is_complex():
            numbers = "two numbers" if CLOCK[name] == 2 else "one number"
            raise EntryError(name, f"has shape {tuple(value.shape)}, must be {numbers}")
        return
    wanted, dtype = shape, value.dtype
    if entry is None:
        if name in schema.refused:
            raise EntryError(name, schema.refused[name])
    elif entry.like == "scale":
        count = param.numel() // GROUP
        if dtype != entry.shown or value.numel() != count:
            found = f"has {value.numel()} elements of {dtype}"
            raise EntryError(name, f"{found}, must have {count} of {entry.shown}")
        return
    elif entry.shown is None:
        if dtype not in NUMBERS:
            raise EntryError(name, f"has dtype {dtype}, must be floating-point")
    elif dtype != entry.shown:
        wrong = f"has dtype {dtype}, but {entry.format!r} is stored as {entry.shown}"
        raise EntryError(name, wrong)
    elif entry.in_bytes:
        wanted = torch.Size((*wanted, 2))
    if value.shape != wanted:
        whose = "the parameter has shape" if wanted == shape else "its bytes have shape"
        wrong = f"has shape {tuple(value.shape)}, but {whose} {tuple(wanted)}"
        if is_dtensor(param) and value.shape[: param.dim()] == local_of(param).shape:
            wrong += ": it is one process's part as a plain tensor; load DTensors or whole tensors"
        raise EntryError(name, wrong)
