"""Loads state dicts: states keep the precision that they were saved with, or are converted."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_mp import _C
from amp_mp.optim.state.check_loadable import by_names, check_loadable, check_parts
from amp_mp.optim.state.saving import own_hook


def load_state(
    optimizer: Optimizer,
    stepper: Any,
    formats: tuple[str, ...],
    state_dict: dict[str, Any],
    load: Callable[[dict[str, Any]], None],
) -> None:
    """Runs torch's `load` for everything but the parameters' states, which torch would round.

    The user's pre-hooks come before the checks, which change nothing, and the user's post-hooks
    after everything: they see the final state. stepper: the optimizer's (step/stepper.py). formats:
    the group's entries that say how something is stored; they stay the optimizer's.
    """
    if not isinstance(state_dict, dict):
        raise TypeError(f"state_dict must be a dict, found {type(state_dict).__name__}")
    groups = optimizer.param_groups
    params = [p for group in groups for p in group["params"]]
    own = [{name: g[name] for name in formats} for g in groups]
    before = dict(vars(optimizer), defaults=dict(optimizer.defaults))  # torch adds to them
    made: list[dict[str, Any] | None] = []  # of each parameter
    undo: list[tuple[Tensor, Tensor]] = []  # weights that other masters round otherwise, as before

    def check(_: Any, found: dict[str, Any]) -> dict[str, Any]:
        check_parts(found, groups)
        found = by_names(found, groups)
        check_loadable(found, params, stepper)
        entries, seed = _C.SavedEntries(stepper.rules), optimizer.defaults["seed"]
        made.extend(_C.restored(entries, groups, optimizer.state, found, seed, undo))
        own_numbers = {number for group in found["param_groups"] for number in group["params"]}
        others = {k: v for k, v in found["state"].items() if k not in own_numbers}
        return {**found, "state": others}

    def restore(_: Any) -> None:
        for group, stored in zip(optimizer.param_groups, own, strict=True):
            group.update(stored)  # the file's entries say how the file stores
        for param, state in zip(params, made, strict=True):
            if state is not None:
                optimizer.state[param] = state
        try:
            stepper.group_rules()  # settings that all groups have to share
        except ValueError as error:
            raise ValueError(f"state_dict: {error}; nothing was loaded") from None

    before_load = own_hook(optimizer._optimizer_load_state_dict_pre_hooks, check, last=True)
    try:
        with before_load, own_hook(optimizer._optimizer_load_state_dict_post_hooks, restore):
            load(state_dict)
    except BaseException:
        vars(optimizer).update(before)
        with torch.no_grad():
            for weight, values in undo:
                weight.copy_(values)
        raise
