"""An optimizer's state dict from what a file has by the parameters' names."""

from typing import Any

import torch
from torch.optim import Optimizer

from amp_mp.checkpoint.contents import Contents
from amp_mp.optim.base import FusedOptimizer, stepper_of
from amp_mp.optim.state.check_loadable import check_loadable
from amp_mp.optim.state.schema import CLOCK, MASTER_ENTRIES, is_coded, schema_of


def check_has_optimizer(contents: Contents, names: set[str], strict: bool) -> None:
    """Raises ValueError where the file has no optimizer.

    So it does, with strict, where the file has states of parameters that are not among `names`.
    """
    if contents.optimizer is None:
        raise ValueError(
            "the checkpoint has no optimizer's state by the names of the model's parameters (names "
            "are in what amp_mp.checkpoint.save and torch's get_optimizer_state_dict write, not in "
            "optimizer.state_dict()); nothing was loaded"
        )
    others = sorted(contents.states.keys() - names)
    if strict and others:
        raise ValueError(
            f"the checkpoint has an optimizer's state of {others[0]!r} and {len(others) - 1} "
            "others, which this optimizer does not have; nothing was loaded (strict=False leaves "
            "them out)"
        )


def packed_state(
    contents: Contents,
    values: dict[str, Any],
    optimizer: Optimizer,
    groups: list[list[str]],
    states: dict[str, dict[str, Any]],
    strict: bool,
) -> dict[str, Any]:
    """The state dict for an optimizer to load.

    values: what was read, by key. groups: the names of the optimizer's parameters, group by group.
    states: of each parameter. Raises ValueError where the file groups the parameters otherwise, or
    the optimizer cannot load the states; nothing is changed.
    """
    saved: dict[str, dict[str, Any]] = {}
    for key, (owner, setting) in contents.groups().items():
        saved.setdefault(owner, {})[setting] = values[key]
    packed: dict[str, Any] = {"state": {}, "param_groups": []}
    number = 0
    for own, names in zip(optimizer.param_groups, groups, strict=True):
        numbers = [*range(number, number + len(names))]
        packed["param_groups"].append({**own, **_settings(saved, names, strict), "params": numbers})
        packed["state"] |= {n: states[k] for n, k in zip(numbers, names, strict=True) if states[k]}
        number += len(names)
    _check(optimizer, packed, [name for names in groups for name in names])
    return packed


def _settings(saved: dict[str, dict[str, Any]], names: list[str], strict: bool) -> dict[str, Any]:
    """The numbers of the file's param_group that holds these parameters.

    saved: groups by number, with the names in "params", or settings by each parameter's name.
    """
    groups = [group for group in saved.values() if set(names) & set(group.get("params", ()))]
    known = {name for group in groups for name in group["params"]}
    for name in names:
        if name in saved and "params" not in saved[name]:
            known.add(name)
            if saved[name] not in groups:
                groups.append(saved[name])
    lacking = [name for name in names if name not in known]
    if strict and lacking:
        raise ValueError(
            f"{lacking[0]!r} and {len(lacking) - 1} others are in no param_group of the checkpoint;"
            " nothing was loaded (strict=False leaves them out)"
        )
    if len(groups) > 1:
        raise ValueError(
            f"the parameters of the group of {names[0]!r} are in {len(groups)} param_groups of the "
            "checkpoint; make the optimizer with the groups that it was saved with; nothing was "
            "loaded"
        )
    return {k: v for group in groups for k, v in group.items() if k != "params"}


def _check(optimizer: Optimizer, packed: dict[str, Any], names: list[str]) -> None:
    """Raises ValueError where the optimizer cannot load the state."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not isinstance(optimizer, FusedOptimizer):
        for number, state in packed["state"].items():
            _refuse_for_torch(optimizer, state, params[number], names[number])
        return
    stepper = stepper_of(optimizer)
    entries = schema_of(stepper.rules).entries
    for number, state in packed["state"].items():
        known = [entry for n in state if (entry := entries.get(n)) is not None]
        strange = sorted(n for n, value in state.items() if n not in entries and _is_state(value))
        if strange and not any(e.like == "param" and e.state != "master" for e in known):
            raise ValueError(
                f"the checkpoint has {strange[0]!r} of {names[number]!r}, and nothing that "
                f"{type(optimizer).__name__} keeps: another optimizer saved it; nothing was loaded"
            )
    check_loadable(packed, params, stepper.rules, stepper.rules_of)


def _refuse_for_torch(
    optimizer: Optimizer, state: dict[str, Any], param: torch.Tensor, name: str
) -> None:
    """Raises ValueError for a parameter's state that an optimizer of torch cannot load."""
    shape = tuple(param.shape)
    for entry, value in state.items():
        if entry in MASTER_ENTRIES or is_coded(entry):
            raise ValueError(
                f"the checkpoint has {entry!r}, which {type(optimizer).__name__} does not know; "
                "load it into an optimizer of amp_mp; nothing was loaded"
            )
        if entry not in CLOCK and _is_state(value) and tuple(value.shape) != shape:
            raise ValueError(
                f"{entry!r} of {name!r} has shape {tuple(value.shape)} in the checkpoint, the "
                f"parameter {shape}; nothing was loaded"
            )


def _is_state(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0
