"""The tensors of a parameter's state: made where they are missing."""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from amp_mp.dtypes import LOW_PRECISION
from amp_mp.optim.rule import Group, OwnNumber, Rule
from amp_mp.optim.state.entries import is_held, store
from amp_mp.optim.state.formats import format_of, native_name, new_state, put
from amp_mp.optim.state.masters import set_master
from amp_mp.optim.state.parts import places
from amp_mp.sharding.shards import local_of

# float64 [], [2] and []: core/rules/base.h, Clock. The last two are names of Clock::own.
CLOCK = ("step", "beta_powers", "layer", "mu_product")
NO_OWN = OwnNumber("layer", 0.0)  # of a rule without a number of its own

States = MutableMapping[Tensor, dict[str, Any]]  # an optimizer's `state`


def init_state(rule: Rule, group: Group, param: Tensor, state: dict[str, Any]) -> Tensor:
    """Makes what is missing of a parameter's state and returns the parameter's clock (clock_of).

    Each of the rule's states is a tensor of the parameter's shape and layout in the format that the
    group names, and the entry's name says which (entry_name); m8 and log8 add a tensor of scales. A
    low-precision parameter also gets a `master`, float32, or remainders (rest_name). Beside a
    DTensor all of these are DTensors placed as it is; the clock is a plain tensor, the same on all
    processes.
    """
    clock = clock_of(state, param, group.get("betas", (0.0, 0.0)), rule.own or NO_OWN)
    for each in rule.states:
        if is_held(state, each.name):
            continue
        format = format_of(group[each.name], param)
        data, scale = new_state(format, param)
        store(state, each.name, param, format, data, scale)
        start = float(group[each.initial]) if each.initial else 0.0
        if start:
            values = torch.full_like(data, start, dtype=torch.float32)
            native = native_name(format)
            put(values, data, scale, native, **places(param, native))
    if param.dtype in LOW_PRECISION:
        set_master(group["master"], param, state)
    return clock


def init_states(rules: list[Rule], groups: list[Group], states: States) -> None:
    """Makes the state of every trainable parameter, also of those without a gradient.

    rules: of each group.
    """
    for rule, group in zip(rules, groups, strict=True):
        for param in group["params"]:
            if param.requires_grad:
                init_state(rule, group, param, states[param])


def clock_of(
    state: dict[str, Any], param: Tensor, betas: tuple[float, float], own: OwnNumber
) -> Tensor:
    """The parameter's clock, one float64 [4]; the state's three entries are views of it.

    step: float64 [], steps taken. beta_powers: float64 [2], running products of the betas. The
    third is the rule's own number, float64 [], under the name that the rule gives it. The clock is
    rebuilt where the entries no longer lie side by side in memory (after loading, copying or an
    assignment), or where a torch.optim checkpoint has no beta_powers.
    """
    step, powers, number = entries = [state.get(n) for n in ("step", "beta_powers", own.name)]
    device = local_of(param).device
    views = [e for e in entries if isinstance(e, Tensor) and e.dtype == torch.float64]
    if len(views) == 3 and all(view.device == device for view in views):
        offsets = [view.storage_offset() - views[0].storage_offset() for view in views]
        if offsets == [0, 1, 3] and len({view.untyped_storage().data_ptr() for view in views}) == 1:
            return views[0].as_strided((4,), (1,))
    # torch's SGD counts no steps: a momentum buffer says that there was at least one.
    count = float(step) if step is not None else float(is_held(state, "momentum_buffer"))
    products = [b**count for b in betas] if powers is None else powers.tolist()
    kept = own.start if number is None else float(number)
    clock = torch.tensor([count, *products, kept], dtype=torch.float64, device=device)
    state["step"], state["beta_powers"], state[own.name] = clock[0], clock[1:3], clock[3]
    return clock
