"""State dicts: 16-bit integers as their bytes, and the form of torch.optim's optimizers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_mp import _C
from amp_mp.optim.rule import Rule
from amp_mp.optim.state.formats import short_name
from amp_mp.optim.state.schema import as_bytes, rows_of, schema_of
from amp_mp.sharding.shards import like, local_of


def shown_state(
    optimizer: Optimizer, rules: tuple[Rule, ...], show: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """torch's state dict, from `show`, with bytes in place of 16-bit integers.

    The tensors share the state's memory, as torch's do. The user's post-hooks see them so.
    """
    entries = schema_of(rules).entries
    in_bytes = {name for name, entry in entries.items() if entry.in_bytes}

    def as_shown(_: Any, found: dict[str, Any]) -> None:
        found["state"] = {
            param: {
                n: as_bytes(v) if n in in_bytes and isinstance(v, Tensor) else v
                for n, v in state.items()
            }
            if isinstance(state, dict)
            else state
            for param, state in found["state"].items()
        }

    hook = optimizer.register_state_dict_post_hook(as_shown, prepend=True)
    try:
        return show()
    finally:
        hook.remove()


def torch_state_dict(optimizer: Optimizer, rules: list[Rule], own: set[str]) -> dict[str, Any]:
    """See FusedOptimizer.torch_state_dict. rules, own: each group's, and entries of ours alone."""
    packed = optimizer.state_dict()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    ids = [number for group in packed["param_groups"] for number in group["params"]]
    pairs = zip(optimizer.param_groups, rules, strict=True)
    of_params = [rule for group, rule in pairs for _ in group["params"]]
    state = {
        number: _torch_state(param, rule, optimizer.state[param])
        for number, param, rule in zip(ids, params, of_params, strict=True)
        if optimizer.state.get(param)
    }
    kept = [{k: v for k, v in g.items() if k not in own} for g in packed["param_groups"]]
    return {"state": state, "param_groups": kept}


def _torch_state(param: Tensor, rule: Rule, state: dict[str, Any]) -> dict[str, Tensor]:
    clock = {"step": state["step"]}
    if rule.own is not None:
        clock[rule.own.name] = state.get(rule.own.name, rule.own.start)
    shown = {name: torch.tensor(float(n), dtype=torch.float32) for name, n in clock.items()}
    for name in rule.names:
        row = next((row for row in rows_of(name) if state.get(row.name) is not None), None)
        if row is not None:
            data, scale = local_of(state[row.name]), local_of(state.get(row.scale))
            format = row.format or short_name(data.dtype)
            shown[name] = like(_C.decode(data, scale, format), param)
    return shown
