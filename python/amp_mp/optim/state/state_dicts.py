"""State dicts: loaded with the precision that they were saved with, shown, and in torch's form."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_mp import _C
from amp_mp.optim.options import as_python
from amp_mp.optim.rule import Rule
from amp_mp.optim.state.check_loadable import by_names, check_loadable, check_parts, without_repeats
from amp_mp.optim.state.stored_formats import MASTER_ENTRIES, as_bytes
from amp_mp.param_groups import params_in


@contextmanager
def own_hook(
    hooks: OrderedDict[Any, Any], hook: Callable[..., Any], last: bool = False
) -> Iterator[None]:
    """Has an optimizer call a hook in the block, before the user's or as the last.

    It has a key of its own, so that the next call replaces what an interrupt has not removed.
    """
    hooks["amp_mp"] = hook
    hooks.move_to_end("amp_mp", last)
    try:
        yield
    finally:
        hooks.pop("amp_mp", None)


def load_state(
    stepper: Any, kept: tuple[str, ...], state_dict: dict[str, Any], load: Callable[..., None]
) -> None:
    """Runs torch's `load` for everything but the parameters' states, which torch would round.

    The user's pre-hooks come before the checks, which change nothing, and the user's post-hooks
    after everything: they see the final state. stepper: the optimizer's (step/stepper.py). kept:
    the entries of groups that stay the optimizer's, for formats and process groups.
    """
    if not isinstance(state_dict, dict):
        raise TypeError(f"state_dict must be a dict, found {type(state_dict).__name__}")
    optimizer = stepper.optimizer
    checked, stepper.checked = stepper.checked, None
    groups = optimizer.param_groups
    params = params_in(groups)
    own = [{name: g[name] for name in kept if name in g} for g in groups]
    before = dict(vars(optimizer), defaults=dict(optimizer.defaults))  # torch adds to them
    made: list[dict[str, Any] | None] = []  # of each parameter

    def check(_: Any, found: dict[str, Any]) -> dict[str, Any]:
        found = without_repeats(found)
        check_parts(found, groups)
        found = by_names(found, groups)
        # A hook of the user may have written into states that were checked before.
        hooks = optimizer._optimizer_load_state_dict_pre_hooks
        if found["state"] is not checked or len(hooks) > 1:
            check_loadable(found, params, stepper)
        entries = _C.SavedEntries(stepper.rules)
        seed = optimizer.defaults["seed"]
        made.extend(_C.restored(entries, groups, found, seed))
        own_numbers = {number for group in found["param_groups"] for number in group["params"]}
        others = {k: v for k, v in found["state"].items() if k not in own_numbers}
        return {**found, "state": others}

    def restore(_: Any) -> None:
        for group, stored in zip(optimizer.param_groups, own, strict=True):
            group.update(stored)  # the file's entries say how the file stores
        for param, state in zip(params, made, strict=True):
            if state is not None:
                optimizer.state[param] = state

    before_load = own_hook(optimizer._optimizer_load_state_dict_pre_hooks, check, last=True)
    try:
        with before_load, own_hook(optimizer._optimizer_load_state_dict_post_hooks, restore):
            load(state_dict)
    except BaseException:
        vars(optimizer).update(before)
        raise
    _C.take_entries(params, made)


def shown_state(
    optimizer: Optimizer, rules: tuple[Rule, ...], show: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """torch's state dict, from `show`, with bytes in place of 16-bit integers, and plain numbers.

    The tensors share the state's memory, as torch's do. The user's post-hooks see them so.
    """
    in_bytes = _C.SavedEntries(rules).in_bytes()

    def as_shown(_: Any, found: dict[str, Any]) -> None:
        for group in found["param_groups"]:
            if "process_groups" in group:
                group["process_groups"] = None  # those of this run, which no file can hold
            group.update((key, as_python(value)) for key, value in group.items() if key != "params")
        for param, state in found["state"].items():
            if isinstance(state, dict):  # a new one: this one is the optimizer's own
                held = {n: v for n, v in state.items() if isinstance(v, Tensor)}
                # Tensors of their own: the state's becomes empty when another master replaces it.
                shown = {
                    n: as_bytes(v) if n in in_bytes else v.detach()
                    for n, v in held.items()
                    if n in in_bytes or n in MASTER_ENTRIES
                }
                found["state"][param] = {**state, **shown}

    with own_hook(optimizer._optimizer_state_dict_post_hooks, as_shown):
        return show()


def torch_state_dict(optimizer: Optimizer, rules: list[Rule], own: set[str]) -> dict[str, Any]:
    """See FusedOptimizer.torch_state_dict. rules: each group's. own: entries that torch lacks."""
    packed = optimizer.state_dict()
    state = {}
    groups = zip(rules, optimizer.param_groups, packed["param_groups"], strict=True)
    for rule, group, shown in groups:
        own_number = rule.own_number
        for param, number in zip(group["params"], shown["params"], strict=True):
            if held := optimizer.state.get(param):
                clock = {"step": held["step"]}
                if own_number is not None:
                    name, start = own_number
                    clock[name] = held.get(name, start)
                counts = {n: torch.tensor(float(x), dtype=torch.float32) for n, x in clock.items()}
                state[number] = counts | _C.decoded_states(rule, param, held)
    kept = [{k: v for k, v in g.items() if k not in own} for g in packed["param_groups"]]
    return {"state": state, "param_groups": kept}
