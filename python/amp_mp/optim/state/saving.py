"""State dicts: 16-bit integers as their bytes, and the form of torch.optim's optimizers."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_mp import _C
from amp_mp.optim.rule import Rule
from amp_mp.optim.state.schema import as_bytes


@contextmanager
def own_hook(
    hooks: OrderedDict[Any, Any], hook: Callable[..., Any], last: bool = False
) -> Iterator[None]:
    """Has an optimizer call a hook in the block, before the user's or as the last.

    It has a key of its own: what an interrupt leaves there the next call replaces.
    """
    hooks["amp_mp"] = hook
    hooks.move_to_end("amp_mp", last)
    try:
        yield
    finally:
        hooks.pop("amp_mp", None)


def shown_state(
    optimizer: Optimizer, rules: tuple[Rule, ...], show: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """torch's state dict, from `show`, with bytes in place of 16-bit integers.

    The tensors share the state's memory, as torch's do. The user's post-hooks see them so.
    """
    in_bytes = _C.SavedEntries(rules).in_bytes()

    def as_shown(_: Any, found: dict[str, Any]) -> None:
        for param, state in found["state"].items():
            if isinstance(state, dict):  # a new one: this one is the optimizer's own
                held = {n: v for n, v in state.items() if n in in_bytes and isinstance(v, Tensor)}
                shown = {name: as_bytes(value) for name, value in held.items()}
                found["state"][param] = {**state, **shown}

    with own_hook(optimizer._optimizer_state_dict_post_hooks, as_shown):
        return show()


def torch_state_dict(optimizer: Optimizer, rules: list[Rule], own: set[str]) -> dict[str, Any]:
    """See FusedOptimizer.torch_state_dict. rules, own: each group's, and entries of ours alone."""
    packed, state = optimizer.state_dict(), {}
    groups = zip(rules, optimizer.param_groups, packed["param_groups"], strict=True)
    for rule, group, shown in groups:
        for param, number in zip(group["params"], shown["params"], strict=True):
            if optimizer.state.get(param):
                state[number] = _torch_state(param, rule, optimizer.state[param])
    kept = [{k: v for k, v in g.items() if k not in own} for g in packed["param_groups"]]
    return {"state": state, "param_groups": kept}


def _torch_state(param: Tensor, rule: Rule, state: dict[str, Any]) -> dict[str, Tensor]:
    clock = {"step": state["step"]}
    if (own := _C.own_number(rule)) is not None:
        name, start = own
        clock[name] = state.get(name, start)
    shown = {name: torch.tensor(float(n), dtype=torch.float32) for name, n in clock.items()}
    return shown | _C.decoded_states(rule, param, state)
