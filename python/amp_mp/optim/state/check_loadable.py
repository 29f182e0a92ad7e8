"""Whether a state dict can be loaded: every check is made before anything is changed."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from amp_mp import _C
from amp_mp.optim.options import RULE_NUMBERS, check_group

# Numbers of param_groups that tell optimizers apart, torch's among them.
OF_RULES = {"betas", "etas", "lambd", "beta2_decay", *RULE_NUMBERS}


def check_loadable(
    state_dict: dict[str, Any],
    params: list[Tensor],
    stepper: Any,
    names: Sequence[str] = (),
) -> None:
    """Raises ValueError naming the entry that is missing or cannot be used, and its parameter.

    state_dict: one that _C.check_parts has nothing against. stepper: the optimizer's
    (step/stepper.py). names: of the parameters, for messages.
    """
    rules_of, own_keys = stepper.rules_of, stepper.hooks.own_keys
    entries, at, what = _C.SavedEntries(stepper.rules), 0, ""
    try:
        for index, group in enumerate(state_dict["param_groups"]):
            what = f"param_group {index}:"
            check_group(group)
        for group in state_dict["param_groups"]:
            possible = tuple(rules_of(group))
            directions = possible[0].directions
            for number in group["params"]:
                if directions is not None:
                    what = ""
                    directions.refuse(group, params[at], f"parameter {at}")
                state = state_dict["state"].get(number)
                wrong = None
                if state is not None:
                    wrong = _C.wrong_state(entries, possible, state, params[at])
                if wrong:
                    what = f"{wrong[0]!r} of {repr(names[at]) if names else f'parameter {at}'}"
                    raise ValueError(wrong[1])
                at += 1
    except ValueError as error:
        raise ValueError(f"state_dict: {what} {error}; nothing was loaded") from None
    for index, group in enumerate(state_dict["param_groups"]):
        keys = {key for rule in rules_of(group) for key in _C.number_keys(rule) if key in own_keys}
        refuse_other(f"state_dict: param_group {index}", group, keys)


def refuse_other(where: str, saved: Iterable[str], own: Iterable[str]) -> None:
    """ValueError where a saved param_group has the numbers of another optimizer than the own."""
    theirs, ours = OF_RULES.intersection(saved), OF_RULES.intersection(own)
    if theirs - ours and ours - theirs:
        raise ValueError(
            f"{where} has {min(theirs - ours)!r} and no {min(ours - theirs)!r}: another optimizer "
            "saved it; nothing was loaded"
        )
