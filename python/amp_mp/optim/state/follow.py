"""State that follows its parameter: to another dtype, layout or device, or another format."""

from typing import Any

from torch import Tensor

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.optim.rule import Group, Rule
from amp_mp.optim.state.entries import Held, held_here, store
from amp_mp.optim.state.formats import (
    DTYPES,
    MASTER_ENTRIES,
    REMAINDERS,
    format_of,
    placed,
    same_layout,
)
from amp_mp.optim.state.parts import stored_anew
from amp_mp.sharding.shards import like, local_of


def follow(rule: Rule, group: Group, param: Tensor, state: dict[str, Any]) -> None:
    """Brings a parameter's state to the parameter's present dtype, layout and device.

    A master is dropped where the dtype has changed, so that a new one is made of the parameter.
    Everything else keeps its values. States take the formats that the group names now.
    """
    fitting = ("master", *REMAINDERS[param.dtype]) if param.dtype in LOW_PRECISION else ()
    for name in MASTER_ENTRIES:
        if name not in fitting:
            state.pop(name, None)
        elif state.get(name) is not None:
            present = local_of(state[name])
            moved = placed(present, local_of(param))
            if moved is not present:
                _C.used_on_current_stream([present])  # it may be of another, and is dropped
                state[name] = like(moved, param)
    for name in rule.names:
        found = held_here(state, name)
        if found is not None and found.format in DTYPES:
            _bring(name, found, group, param, state)


def _bring(name: str, found: Held, group: Group, param: Tensor, state: dict[str, Any]) -> None:
    """Moves one state; one stored in groups of neighbours is stored anew in another layout."""
    wanted, local = format_of(group[name], param), local_of(param)
    if found.format == wanted and (found.scale is None or same_layout(found.data, local)):
        data = placed(found.data, local)
        scale = None if found.scale is None else found.scale.to(local.device)
        if data is found.data and scale is found.scale:
            return
    else:
        data, scale = stored_anew(found, wanted, param, seed=int(group["seed"]))
    _C.used_on_current_stream([t for t in (found.data, found.scale) if t is not None])
    store(state, name, param, wanted, data, scale)
