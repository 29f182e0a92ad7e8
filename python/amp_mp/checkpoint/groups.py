"""An optimizer's state dict from what a file has by the parameters' names."""

from typing import Any

from amp_mp.checkpoint.contents import Contents


def saved_groups(
    contents: Contents,
    values: dict[str, Any],
    groups: list[list[str]],
    states: dict[str, dict[str, Any]],
    strict: bool,
) -> dict[str, Any]:
    """The state dict to load.

    values: what was read, by key. groups: the names of the optimizer's parameters, group by group.
    states: of each parameter. Raises ValueError where the file has no optimizer, groups the
    parameters otherwise, or (strict) has states of other parameters.
    """
    if contents.optimizer is None:
        raise ValueError("the checkpoint has no optimizer's state of the model's parameters")
    names = {name for group in groups for name in group}
    others = sorted(contents.stepped() - names)
    if strict and others:
        raise ValueError(
            f"the checkpoint has an optimizer's state of {others[0]!r} and {len(others) - 1} "
            "others, which this optimizer does not have; strict=False leaves them out"
        )
    packed: dict[str, Any] = {"state": {}, "param_groups": []}
    number = 0
    for own in groups:
        settings = contents.settings(values, own)
        packed["param_groups"].append({**settings, "params": [*range(number, number + len(own))]})
        for name in own:
            if states.get(name):
                packed["state"][number] = states[name]
            number += 1
    return packed
