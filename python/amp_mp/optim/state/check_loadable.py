"""Whether a state dict can be loaded: every check is made before anything is changed."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from amp_mp import _C
from amp_mp.optim.options import ALLOWED, check_group, check_scatter
from amp_mp.optim.step.params import first_places

# Numbers of param_groups that tell optimizers apart, torch's among them.
OF_RULES = {name.split("[")[0] for name, allowed in ALLOWED.items() if allowed != "flag"}
OF_RULES = OF_RULES - {"lr", "eps", "weight_decay", "beta2"} | {"etas", "lambd", "beta2_decay"}


def check_parts(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """Raises ValueError where a state dict lacks what torch's has, for these param_groups.

    So it does for other parts, groups or numbers of parameters.
    """
    if lacking := [name for name in ("state", "param_groups") if name not in state_dict]:
        raise _refused(f"{lacking} missing")
    state, files = state_dict["state"], state_dict["param_groups"]
    if not isinstance(state, dict):
        raise _refused(f"'state' must be a dict, found {_described(state)}")
    if not isinstance(files, list | tuple):
        raise _refused(f"'param_groups' must be a list, found {_described(files)}")
    if len(files) != len(groups):
        raise _refused(f"there are {len(files)} param_groups, and the optimizer has {len(groups)}")
    for index, (file, group) in enumerate(zip(files, groups, strict=True)):
        _check_group_of_file(f"param_group {index}", file, len(group["params"]))


def _check_group_of_file(name: str, file: Any, count: int) -> None:
    if not isinstance(file, dict):
        raise _refused(f"{name} must be a dict, found {_described(file)}")
    if "params" not in file:
        raise _refused(f"{name}: 'params' is missing")
    numbers = file["params"]
    if not _are_numbers(numbers):
        raise _refused(f"{name}: 'params' must be a list of numbers, found {_described(numbers)}")
    if len(numbers) != count:
        raise _refused(f"{name} has {len(numbers)} parameters, the optimizer's has {count}")


def _are_numbers(params: Any) -> bool:
    """Whether it is what a state dict has for parameters: numbers, or names."""
    if not isinstance(params, list | tuple):
        return False
    return not [number for number in params if not isinstance(number, int | str)]


def without_repeats(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict in which each group has each parameter once; torch writes one down twice.

    Anything but groups of torch's form stays as it is, for check_parts.
    """
    files = state_dict.get("param_groups")
    if not isinstance(files, list | tuple):
        return state_dict
    return {**state_dict, "param_groups": [_without_repeats(file) for file in files]}


def _without_repeats(file: Any) -> Any:
    numbers: Any = file.get("params") if isinstance(file, dict) else None
    if not _are_numbers(numbers):
        return file
    names, kept = file.get("param_names"), first_places(numbers)
    if len(kept) == len(numbers):
        return file
    found = {**file, "params": [numbers[at] for at in kept]}
    if isinstance(names, list | tuple) and len(names) == len(numbers):
        found["param_names"] = [names[at] for at in kept]
    return found


def by_names(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """A state dict with its groups and parameters in the order of these groups' param_names.

    It is as it was where one of the two has no names. Raises ValueError naming a parameter that the
    file lacks, or has in a group with others.
    """
    files = state_dict["param_groups"]
    if any("param_names" not in group for group in (*files, *groups)):
        return state_dict
    places: dict[str, tuple[dict[str, Any], Any]] = {}  # by name, its group and number
    for index, file in enumerate(files):
        names, numbers = file["param_names"], file["params"]
        if not isinstance(names, list | tuple) or len(names) != len(numbers):
            must = "'param_names' must be a name for each parameter"
            raise _refused(f"param_group {index}: {must}, found {_described(names)}")
        places |= {str(name): (file, number) for name, number in zip(names, numbers, strict=True)}
    ordered = []
    for group, file in zip(groups, files, strict=True):
        names = group["param_names"]
        if lacking := [name for name in names if str(name) not in places]:
            raise _refused(
                f"the optimizer's parameter {lacking[0]!r} is not in the file, by param_names"
            )
        own = [places[str(name)] for name in names]
        home = own[0][0] if own else file
        for name, (theirs, _) in zip(names, own, strict=True):
            if theirs is not home or len(names) != len(home["params"]):
                raise _refused(
                    f"the parameters of the group of {name!r} are in other param_groups of the "
                    "file, by param_names"
                )
        ordered.append(
            {**home, "params": [number for _, number in own], "param_names": list(names)}
        )
    return {**state_dict, "param_groups": ordered}


def _refused(wrong: str) -> ValueError:
    return ValueError(f"state_dict: {wrong}; nothing was loaded")


def _described(value: Any) -> str:
    """What a value is: its class, and the value itself where that is short."""
    text, kind = repr(value), type(value).__name__
    return f"{kind} {text}" if len(text) < 40 else kind


def check_loadable(
    state_dict: dict[str, Any], params: list[Tensor], stepper: Any, names: Sequence[str] = ()
) -> None:
    """Raises ValueError naming the entry that is missing or cannot be used, and its parameter.

    state_dict: one that check_parts has nothing against. stepper: the optimizer's
    (step/stepper.py). names: what messages call the parameters.
    """
    entries, at, what, rules = _C.SavedEntries(stepper.rules), 0, "", []
    groups = state_dict["param_groups"]
    try:
        for index, group in enumerate(groups):
            what = f"param_group {index}:"
            check_group(group)
            check_scatter(group)
            rules.append(stepper.rule_of(group))
        for rule, group in zip(rules, groups, strict=True):
            what = ""
            own = params[at : at + len(group["params"])]
            if (directions := rule.directions) is not None:
                for index, param in enumerate(own, at):
                    directions.refuse(group, param, f"parameter {index}")
            states = [state_dict["state"].get(number) for number in group["params"]]
            if wrong := _C.wrong_state(entries, rule, states, own):
                place, (entry, found) = wrong
                label = repr(names[at + place]) if names else f"parameter {at + place}"
                what = f"{entry!r} of {label}"
                raise ValueError(found)
            at += len(own)
    except ValueError as error:
        raise ValueError(f"state_dict: {what} {error}; nothing was loaded") from None
    for index, (used, group) in enumerate(zip(rules, groups, strict=True)):
        # Those of all rules that may follow one another here, with and without momentum, say.
        kin = [rule for rule in stepper.rules if rule.directions is used.directions]
        keys = {key for rule in kin for key in rule.number_keys}
        refuse_other(f"state_dict: param_group {index}", group, keys & stepper.own_keys)


def refuse_other(where: str, saved: Iterable[str], own: Iterable[str]) -> None:
    """ValueError where a saved param_group has the numbers of another optimizer."""
    theirs, ours = OF_RULES.intersection(saved), OF_RULES.intersection(own)
    if theirs - ours and ours - theirs:
        raise ValueError(
            f"{where} has {min(theirs - ours)!r} and no {min(ours - theirs)!r}: another optimizer "
            "saved it; nothing was loaded"
        )
