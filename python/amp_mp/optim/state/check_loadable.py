"""Whether a state dict can be loaded: every check is made before anything is changed."""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.dtypes import NATIVE
from amp_mp.optim.options import RULE_NUMBERS, check_group
from amp_mp.optim.rule import Group, Rule
from amp_mp.optim.state.schema import required, schema_of
from amp_mp.text_table import dtype_name

# The formats in which entries with plain names are read, by dtype; torch may have saved float64.
NUMBERS = {dtype: dtype_name(dtype) for dtype in NATIVE} | {torch.float64: "float32"}

# Numbers of param_groups that tell optimizers apart, torch's among them.
OF_RULES = {"betas", "etas", "lambd", "beta2_decay", *RULE_NUMBERS}

RulesOf = Callable[[Group], Iterable[Rule]]  # those that a param_group of a file may have


def check_loadable(
    state_dict: dict[str, Any],
    params: list[Tensor],
    rules: tuple[Rule, ...],
    rules_of: RulesOf,
    fitting: Container[int] = (),
    names: Sequence[str] = (),
) -> None:
    """Raises ValueError naming the entry that is missing or cannot be used, and its parameter.

    state_dict: one that _C.check_parts has nothing against. fitting: parameters whose
    states were looked at already. names: of the parameters, for messages.
    """
    schema, at, what = schema_of(rules), 0, ""
    try:
        for index, group in enumerate(state_dict["param_groups"]):
            what = f"param_group {index}:"
            check_group(group)
        for group in state_dict["param_groups"]:
            possible = tuple(rules_of(group))
            needed, directions = required(possible), possible[0].directions
            for number in group["params"]:
                if directions is not None:
                    what = ""
                    directions.refuse(group, params[at], f"parameter {at}")
                state = state_dict["state"].get(number)
                looked_at = state is None or at in fitting
                if not looked_at and (wrong := _C.wrong_state(schema, needed, state, params[at])):
                    what = f"{wrong[0]!r} of {repr(names[at]) if names else f'parameter {at}'}"
                    raise ValueError(wrong[1])
                at += 1
    except ValueError as error:
        raise ValueError(f"state_dict: {what} {error}; nothing was loaded") from None
    for index, group in enumerate(state_dict["param_groups"]):
        numbers = {number.key for rule in rules_of(group) for number in rule.numbers}
        refuse_other(f"state_dict: param_group {index}", group, numbers)


def refuse_other(where: str, saved: Iterable[str], own: Iterable[str]) -> None:
    """ValueError where a saved param_group has the numbers of another optimizer than the own."""
    theirs, ours = OF_RULES.intersection(saved), OF_RULES.intersection(own)
    if theirs - ours and ours - theirs:
        raise ValueError(
            f"{where} has {min(theirs - ours)!r} and no {min(ours - theirs)!r}: another optimizer "
            "saved it; nothing was loaded"
        )
