"""Errors, by name, for parameters and states that no fused optimizer can step."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from amp_mp.dtypes import NATIVE
from amp_mp.optim.rule import Rule, missing_states
from amp_mp.optim.state.entries import entries_of, held_twice
from amp_mp.optim.state.formats import MASTER_ENTRIES


def refuse_param(param: Tensor, label: str) -> None:
    """Raises TypeError for a parameter on the meta device, a DTensor, or another dtype."""
    wrong = ""
    if param.device.type == "meta":
        wrong = "is on the meta device; give it memory first, with model.to_empty(device=...)"
    elif hasattr(param, "__tensor_flatten__"):  # a subclass without memory of its own
        wrong = (
            f"is a {type(param.data).__name__}; pass plain tensors, for a DTensor its .to_local()"
        )
    elif param.dtype not in NATIVE:
        wrong = (
            f"has dtype {param.dtype}; amp_mp's optimizers take float32, float16 and bfloat16, use "
            "torch.optim for the others"
        )
    if wrong:
        raise TypeError(f"{label} {wrong}")


def refuse_state(rule: Rule, param: Tensor, state: Mapping[str, Any], label: str) -> None:
    """Raises ValueError for state of another shape, held twice, or lacking a tensor after steps."""
    for name in rule.names:
        twice = held_twice(state, name)
        if twice:
            raise ValueError(
                f"the state of {label} holds {name!r} twice, as {twice[0]!r} and as {twice[1]!r}; "
                "remove one of them"
            )
    for name in (*MASTER_ENTRIES, *(e for n in rule.names for e in entries_of(n))):
        held = state.get(name)
        if isinstance(held, Tensor) and held.shape != param.shape:
            raise ValueError(
                f"{label} has shape {tuple(param.shape)}, but its {name} has shape "
                f"{tuple(held.shape)}: a parameter of another shape starts anew, so drop its state "
                "with `del optimizer.state[param]`"
            )
    missing = missing_states([rule], state)
    if missing:
        raise ValueError(
            f"the state of {label} has no {missing[0]!r}, though the parameter has taken steps; "
            "put it back, or clear the parameter's whole state to start it anew"
        )
