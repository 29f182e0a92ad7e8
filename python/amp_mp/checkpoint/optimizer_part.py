"""An optimizer's state in a checkpoint, by the names of the model's parameters.

A template is an empty tensor, as the file stores it, for torch.distributed.checkpoint to fill. It
has the file's dtype, and is split over processes as the tensor that it is for, so that every
process reads its own shard. Three things are read whole on every process: numbers such as the step
count; codes of groups that the shards here would cut, with their scales; and what is neither the
model's nor the optimizer's.
"""

from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_mp import _C
from amp_mp.checkpoint.contents import Contents, empty_like
from amp_mp.checkpoint.model_part import named_params
from amp_mp.checkpoint.reading import Reading
from amp_mp.optim.base import FusedOptimizer, stepper_of
from amp_mp.optim.state import stored_formats as stored
from amp_mp.optim.state.check_loadable import check_loadable, refuse_other
from amp_mp.param_groups import labelled, params_in
from amp_mp.sharding.shards import any_dtensor, is_dtensor, like, local_of
from amp_mp.wrappers.fp16_optimizer import FP16_Optimizer

STATE = "optimizer.state."  # what the keys of states begin with where `save` wrote them

# The layout of codes that were not row-major, by the number of dimensions: the only dense one for
# 2, the one that torch has a name for with more.
OTHER_LAYOUTS = {2: (1, 0), 4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}

# What torch's optimizers keep of a parameter, in all versions from 2.11 to 2.15; and what, if a
# setting of the param_group is not 0 or False. Adafactor's depend on the parameter.
TORCHS_ENTRIES = {
    "ASGD": ("step", "eta", "mu", "ax"),
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "Adagrad": ("step", "sum"),
    "Adam": ("step", "exp_avg", "exp_avg_sq"),
    "AdamW": ("step", "exp_avg", "exp_avg_sq"),
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "Muon": ("momentum_buffer",),
    "NAdam": ("step", "mu_product", "exp_avg", "exp_avg_sq"),
    "RAdam": ("step", "exp_avg", "exp_avg_sq"),
    "RMSprop": ("step", "square_avg"),
    "Rprop": ("step", "prev", "step_size"),
}
TORCHS_SETTINGS = {
    "Adam": {"max_exp_avg_sq": "amsgrad"},
    "AdamW": {"max_exp_avg_sq": "amsgrad"},
    "RMSprop": {"momentum_buffer": "momentum", "grad_avg": "centered"},
    "SGD": {"momentum_buffer": "momentum"},
}
TORCHS_NUMBERS = ("step", "eta", "mu", "mu_product")


def refuse_sharded(more: dict[str, Any]) -> None:
    """TypeError for an optimizer of sharded parameters among other objects to save or load.

    So for one with process_groups, whose parameters differ between processes.
    """
    for name, each in more.items():
        groups = each.param_groups if isinstance(each, Optimizer) else []
        named = any(group.get("process_groups") for group in groups)
        if named or any_dtensor(params_in(groups)):
            what = "with process_groups" if named else "of sharded parameters"
            raise TypeError(
                f"{name} is an optimizer {what}; save it with its model in a directory of its own"
            )


def innermost(optimizer: Any) -> Any:
    """The optimizer inside of wrappers that show its param_groups: LARC, Accelerate's."""
    inner: Any = getattr(optimizer, "optimizer", None)
    is_around = isinstance(optimizer, Optimizer) and isinstance(inner, Optimizer)
    if not is_around or isinstance(optimizer, FP16_Optimizer):
        return optimizer
    return innermost(inner) if inner.param_groups is optimizer.param_groups else optimizer


def names_of_groups(params: dict[str, Tensor], optimizer: Any) -> list[list[str]]:
    """The names of an optimizer's parameters, group by group. params: the model's, by name.

    TypeError for what is not a torch.optim.Optimizer, or keeps masters in place of the model's
    parameters; ValueError for a parameter that is not the model's.
    """
    if isinstance(optimizer, FP16_Optimizer):
        raise TypeError(
            "optimizer is an FP16_Optimizer; around one of amp_mp's pass optimizer.optimizer and "
            "scaler=optimizer.loss_scaler, around another save its state_dict() as it is"
        )
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, found {kind}")
    names = {param: name for name, param in params.items()}
    found = []
    for number, group in enumerate(optimizer.param_groups):
        if strangers := [param for param in group["params"] if param not in names]:
            label = next(label for param, label in labelled(group, number) if param not in names)
            raise ValueError(
                f"{label}, of shape {tuple(strangers[0].shape)}, is none of the model's "
                "parameters; make the optimizer after the model was sharded, from "
                "model.parameters()"
            )
        found.append([names[param] for param in group["params"]])
    return found


def named_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state dict with names in place of numbers, as torch's checkpoints have it."""
    names = names_of_groups(named_params(model), optimizer)
    if isinstance(optimizer, FusedOptimizer):
        optimizer.init_state()  # what has had no gradient yet is in the file, too
    packed = optimizer.state_dict()
    groups = list(zip(packed["param_groups"], names, strict=True))
    name_of = {n: k for group, own in groups for n, k in zip(group["params"], own, strict=True)}
    for other in packed["state"].keys() - name_of.keys():
        raise ValueError(
            f"optimizer.state has {other!r}, which is not a parameter; pass it to save by name"
        )
    return {
        "state": {name_of[number]: state for number, state in packed["state"].items()},
        "param_groups": [
            {**group, "params": own, **without_groups(group)} for group, own in groups
        ],
    }


def without_groups(group: dict[str, Any]) -> dict[str, None]:
    """What takes a param_group's process_groups out: those of this run, which no file can hold."""
    return {"process_groups": None} if "process_groups" in group else {}


def check_has_optimizer(contents: Contents) -> None:
    """Raises ValueError where the file has no optimizer."""
    if contents.optimizer is None:
        raise ValueError(
            "the checkpoint has no optimizer's state by the names of the model's parameters (names "
            "are in what amp_mp.checkpoint.save and torch's get_optimizer_state_dict write, not in "
            "optimizer.state_dict()); nothing was loaded"
        )


def beside(contents: Contents, names: set[str]) -> set[str]:
    """The names of which the file has states, and these do not; also those of other processes."""
    states = {key.removeprefix(STATE) for key in contents.places if key.startswith(STATE)}
    return (contents.states.keys() | states) - names


def refuse_others(names: set[str]) -> None:
    """ValueError where the file has states of parameters that no process's optimizer has."""
    if names:
        raise ValueError(
            f"the checkpoint has an optimizer's state of {min(names)!r} and {len(names) - 1} "
            "others, which this optimizer does not have; nothing was loaded (strict=False leaves "
            "them out)"
        )


def template(
    contents: Contents,
    name: str,
    param: Tensor,
    masters_alone: bool = False,
    offloads: bool = False,
) -> dict[str, Any]:
    """By entry, an empty tensor for what the file has of a parameter's optimizer state.

    masters_alone: True leaves out all other states. offloads: True makes them in memory of the CPU.
    Raises ValueError for codes in an unknown layout.
    """
    keys = contents.states.get(name, {})
    shape, device = tuple(param.shape), local_of(param).device
    found: dict[str, Any] = {}
    alike: dict[str, torch.dtype] = {}  # entries of the parameter's shape
    in_bytes, wholes = [], {}  # of 16-bit integers; those that are read whole, with their keys
    for entry, key in keys.items():
        if masters_alone and entry not in stored.MASTER_ENTRIES:
            continue
        data = contents.tensors.get(key)
        scales = contents.tensors.get(keys.get(f"{entry}{stored.SCALE}", ""))
        if data is None or entry in stored.CLOCK:
            wholes[entry] = key
        elif scales is not None:
            found |= _grouped(entry, data, scales, param)
        elif entry in found:  # the scales of codes
            continue
        elif data.size == shape:
            alike[entry] = data.properties.dtype
        elif data.size == (*shape, 2) and data.properties.dtype == torch.uint8:
            in_bytes.append(entry)
        elif _is_packed_for(entry, data, param):
            own = _C.second_shape(stored.PACKED, param, local_of(param).shape)
            empty_part = local_of(param).new_empty(own, dtype=data.properties.dtype)
            found[entry] = like(empty_part, param, data.size)
        else:
            wholes[entry] = key
    found |= empty_like(param, {**alike, **dict.fromkeys(in_bytes, torch.int16)})
    for entry in in_bytes:
        found[entry] = stored.as_bytes(found[entry])
    empty = contents.empty(wholes.values(), device)
    for entry, key in wholes.items():
        found[entry] = empty[key]
    for entry, value in found.items() if offloads else ():
        if value is not None:
            found[entry] = like(torch.empty_like(local_of(value), device="cpu"), value)
    return found


def _is_packed_for(entry: str, data: Any, param: Tensor) -> bool:
    """Whether an entry has packed remainders that can be cut as the parameter is."""
    is_packed = stored.MASTER_ENTRIES.get(entry) == torch.uint8
    return (
        is_packed
        and _C.has_groups(stored.PACKED, param)
        and data.size == _C.second_shape(stored.PACKED, param)
    )


def _grouped(entry: str, data: Any, scales: Any, param: Tensor) -> dict[str, Tensor]:
    """Empty codes and their scales: cut as the parameter is where that cuts between groups.

    data, scales: torch's metadata.
    """
    local = local_of(param)
    second = f"{entry}{stored.SCALE}"
    kind, kind_of_scales = data.properties.dtype, scales.properties.dtype
    format = entry.rpartition("_")[2]
    fits = _C.has_groups(format, param) or not is_dtensor(param)
    if fits and scales.size == _C.second_shape(format, param):
        own = local.new_empty(_C.second_shape(format, param, local.shape), dtype=kind_of_scales)
        return {**empty_like(param, {entry: kind}), second: like(own, param, scales.size)}
    row_major = _C.second_shape(format, torch.empty(data.size, device="meta"))
    order = tuple(range(len(data.size)))
    if len(scales.size) == 1 and row_major != scales.size:
        # Groups are of neighbours in memory, and flat scales say that this was not row-major.
        order = OTHER_LAYOUTS.get(len(data.size), ())
        if not order:
            raise ValueError(
                f"{entry!r} of a parameter of shape {tuple(data.size)} was saved in a layout that "
                "is not row-major; load it into a parameter of the same layout; nothing was loaded"
            )
    codes = torch.empty([data.size[d] for d in order], dtype=kind, device=local.device)
    codes = codes.permute([order.index(d) for d in range(len(order))])
    whole = torch.empty(scales.size, dtype=kind_of_scales, device=local.device)
    return {entry: codes, second: whole}


def packed_state(reading: Reading, optimizer: Optimizer, strict: bool) -> dict[str, Any]:
    """The state dict for an optimizer to load.

    Without the masters of parameters that have float32 values; model_part.keep_masters sets those.
    Raises ValueError where the file groups the parameters otherwise, or the optimizer cannot load
    the states; nothing is changed.
    """
    groups, values = reading.groups, reading.others
    saved: dict[str, dict[str, Any]] = {}
    for key, (owner, setting) in reading.contents.groups.items():
        if setting == "params" and not isinstance(values[key], list | tuple):
            wrong = f"the checkpoint has {values[key]!r} as {key!r}, which must be a list of names"
            raise ValueError(f"{wrong}; nothing was loaded")
        saved.setdefault(owner, {})[setting] = values[key]
    names = [name for own in groups for name in own]
    settings = [_settings(saved, own, strict) for own in groups]
    number_of = {name: number for number, name in enumerate(names)}
    states = {name: reading.states[name] for name in names}
    for name in reading.masters.keys() & number_of.keys():
        own = states[name].items()
        states[name] = {entry: x for entry, x in own if entry not in stored.MASTER_ENTRIES}
    packed = {
        "state": {number_of[name]: states[name] for name in names if states[name]},
        "param_groups": [
            {
                **group,
                **found,
                "params": [number_of[name] for name in own],
                **without_groups(group),
            }
            for group, found, own in zip(optimizer.param_groups, settings, groups, strict=True)
        ],
    }
    _check(optimizer, packed, names)
    for group, found in zip(optimizer.param_groups, settings, strict=True):
        refuse_other("a param_group of the checkpoint", found, group)
    return packed


def load_checked(optimizer: Optimizer, packed: dict[str, Any]) -> None:
    """Has the optimizer load what `packed_state` has checked, without a second check."""
    if isinstance(optimizer, FusedOptimizer):
        stepper_of(optimizer).checked = packed["state"]
    own = [group.get("process_groups") for group in optimizer.param_groups]
    optimizer.load_state_dict(packed)
    for group, kept in zip(optimizer.param_groups, own, strict=True):
        if kept is not None:  # torch's optimizers have taken the groups as they were packed
            group["process_groups"] = kept


def _settings(saved: dict[str, dict[str, Any]], names: list[str], strict: bool) -> dict[str, Any]:
    """The numbers of the file's param_group that holds these parameters.

    saved: groups by number, with the names in "params", or settings by each parameter's name.
    """
    named = ("params", "param_names")
    groups: list[dict[str, Any]] = []
    known: set[str] = set()
    for number, group in saved.items():
        # Those of other processes stand last, and are for parameters that have moved here.
        own = (set(names) - known) & set(group.get("params", ()))
        settings = {k: v for k, v in group.items() if k not in named}
        if own and not (number.startswith("~") and settings in groups):
            groups.append(settings)
        known |= own
    for name in names:
        if name in saved and "params" not in saved[name]:
            known.add(name)
            if saved[name] not in groups:
                groups.append(saved[name])
    lacking = [name for name in names if name not in known]
    if strict and lacking:
        raise ValueError(
            f"{lacking[0]!r} and {len(lacking) - 1} others are in no param_group of the checkpoint;"
            " nothing was loaded (strict=False leaves them out)"
        )
    if len(groups) > 1:
        raise ValueError(
            f"the parameters of the group of {names[0]!r} are in {len(groups)} param_groups of the "
            "checkpoint; make the optimizer with the groups that it was saved with; nothing was "
            "loaded"
        )
    return {k: v for group in groups for k, v in group.items() if k not in named}


def _check(optimizer: Optimizer, packed: dict[str, Any], names: list[str]) -> None:
    params = params_in(optimizer.param_groups)
    if isinstance(optimizer, FusedOptimizer):
        try:
            check_loadable(packed, params, stepper_of(optimizer), names)
        except ValueError as error:
            raise ValueError(str(error).replace("state_dict", "the checkpoint", 1)) from None
        return
    numbers = ((group, number) for group in packed["param_groups"] for number in group["params"])
    for (group, number), param, name in zip(numbers, params, names, strict=True):
        if state := packed["state"].get(number):
            _refuse_for_torch(type(optimizer), group, state, param, name)


def _refuse_for_torch(
    optimizer: type, group: dict[str, Any], state: dict[str, Any], param: Tensor, name: str
) -> None:
    shape, kind = tuple(param.shape), optimizer.__name__
    is_torchs = f"{optimizer.__module__}.".startswith("torch.optim.")
    needed = _needed(kind, group, param.dim()) if is_torchs else ()
    of_factors = {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, *shape[-1:])}
    wrong = ""
    for entry, value in {**dict.fromkeys(needed), **state}.items():
        is_number = entry in TORCHS_NUMBERS or (entry not in needed and not _shape(value))
        wanted = () if is_number else of_factors.get(entry, shape)
        if entry in stored.MASTER_ENTRIES or entry.endswith(stored.CODED):
            wrong = f", which {kind} does not know; load it into an optimizer of amp_mp"
        elif entry in needed and not isinstance(value, Tensor | Real):
            wrong = f" as {value!r}, and {kind} needs it: another optimizer saved it"
        elif _shape(value) != wanted:
            wrong = f" of shape {_shape(value)}, must have {wanted}"
        elif entry == "step" and (text := _C.wrong_clock(value, entry)):
            wrong = f", which {text}"
        if wrong:
            wrong = f"the checkpoint has {entry!r}{wrong} (for {name!r}); nothing was loaded"
            raise ValueError(wrong)


def _needed(kind: str, group: dict[str, Any], dims: int) -> tuple[str, ...]:
    """What torch's optimizer of this name steps with, where it has stepped before."""
    if kind == "Adafactor":
        return "step", *(("row_var", "col_var") if dims > 1 else ("variance",))
    by_setting = TORCHS_SETTINGS.get(kind, {})
    given = {entry: group.get(setting) for entry, setting in by_setting.items()}
    own = [entry for entry, value in given.items() if isinstance(value, Real) and value]
    return (*TORCHS_ENTRIES.get(kind, ()), *own)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()
