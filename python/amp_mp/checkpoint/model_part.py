"""A model in a checkpoint: names without what wrappers add, and weights in the file's dtypes."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_mp import _C
from amp_mp.checkpoint.contents import Contents, empty_like
from amp_mp.checkpoint.reading import Reading
from amp_mp.dtypes import LOW_PRECISION, rounded
from amp_mp.module_names import is_wrapper, plain_name, plain_names
from amp_mp.optim.base import FusedOptimizer, stepper_of
from amp_mp.optim.state import kept_masters
from amp_mp.optim.state.stored_formats import MASTER_ENTRIES, PACKED, as_bytes
from amp_mp.param_groups import params_in
from amp_mp.sharding.shards import like, local_of, locals_of
from amp_mp.torch_private import EXTRA_STATE, tree_map_only


def state_of(model: nn.Module) -> dict[str, Any]:
    """The state dict with the plain model's names. Puts back what FSDP2 has gathered."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    # torch takes off what wrappers add to names, but for nn.DataParallel's.
    plain, torchs = plain_names(model), plain_names(model, is_wrapper)
    names = {own: plain[path] for path, own in torchs.items()}
    return {plain_name(names, name): value for name, value in get_model_state_dict(model).items()}


def named_params(model: nn.Module, every_name: bool = False) -> dict[str, Tensor]:
    """Every parameter by its name. One with several names has its first, or all of them."""
    names = plain_names(model)
    named = model.named_parameters(remove_duplicate=not every_name)
    return {plain_name(names, name): param for name, param in named}


def template(contents: Contents, targets: dict[str, Any], strict: bool) -> dict[str, Any]:
    """By name, an empty tensor for every tensor of the model, None for what is not a tensor.

    targets: the model's state dict. Raises ValueError for a tensor of another shape, and, with
    strict, for one that is missing.
    """
    if contents.model is None:
        raise ValueError(
            "the checkpoint has none of the model's parameters, by their names; nothing was loaded"
        )
    key_of = {name: f"{contents.model}{name}" for name in targets}
    if strict:
        refuse_any(set(key_of.values()) - contents.keys, "in the checkpoint")
    found: dict[str, Any] = {}
    for name, value in targets.items():
        key = key_of[name]
        entry = contents.tensors.get(key)
        if key not in contents.keys:
            continue
        if entry is None or key.endswith(EXTRA_STATE):
            found[name] = contents.empty([key])[key]
            continue
        shape = tuple(value.shape) if isinstance(value, Tensor) else None
        if shape != entry.size:
            raise ValueError(
                f"{key!r} has shape {tuple(entry.size)} in the checkpoint, {shape} in the model; "
                "nothing was loaded"
            )
        found |= empty_like(value, {name: entry.properties.dtype})
    return found


def beside(contents: Contents, targets: dict[str, Any]) -> set[str]:
    """The keys of the file's tensors, and of other processes', that this model does not have."""
    if not contents.model:
        return set()
    found = {*contents.tensors, *contents.places}
    own = {f"{contents.model}{name}" for name in targets}
    return {key for key in found if key.startswith(contents.model)} - own


def refuse_any(keys: set[str], whose: str) -> None:
    """ValueError where there are keys, which are not in the checkpoint or not in the model."""
    if keys:
        raise ValueError(
            f"{min(keys)!r} and {len(keys) - 1} others are not {whose}; nothing was loaded "
            "(strict=False leaves them out)"
        )


def float32_values(reading: Reading) -> dict[str, Tensor]:
    """This process's float32 values of the weights that the file and a master may hold otherwise.

    By name, for all weights but those that are the same bits in the file and in the parameter:
    float32 in both, or low-precision beside a master that the optimizer's load_state_dict reads.
    """
    names = [name for name in reading.params if name in reading.weights]
    weights = dict(zip(names, locals_of([reading.weights[n] for n in names]), strict=True))
    read = [
        (name, entry, value)
        for name in names
        for entry, value in reading.states[name].items()
        if entry in MASTER_ENTRIES and value is not None
    ]
    masters: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for name, entry, value in read:
        masters[name].update([_C.master_part(entry, value, reading.weights[name])])
    found = {}
    for name, weight in weights.items():
        own, low = masters[name], weight.dtype in LOW_PRECISION
        same = weight.dtype == reading.params[name].dtype
        if same and (not low or (own and name in reading.names)):
            continue
        values = _C.master_values(weight, own) if low else None
        found[name] = weight.float() if values is None else values
    return found


def load_weights(model: nn.Module, reading: Reading, undo: ExitStack) -> None:
    """Copies a file's parameters and buffers into the model, and the extra state of its modules.

    undo: receives one callback for each change. A loaded weight is freed at once, and its name
    stays.
    """
    weights, targets = reading.weights, reading.targets
    first = {param: name for name, param in reading.params.items()}
    every = named_params(model, every_name=True)
    names = plain_names(model)
    modules = {names[path]: m for path, m in model.named_modules(remove_duplicate=False)}
    locals_here = dict(zip(targets, locals_of(targets.values()), strict=True))
    for name, value in weights.items():
        param = every.get(name)
        if name.endswith(EXTRA_STATE):
            module = modules[name.removesuffix(EXTRA_STATE).rstrip(".")]
            wrapped = isinstance(value, tuple) and len(value) == 1
            undo.callback(module.set_extra_state, module.get_extra_state())
            module.set_extra_state(value[0] if wrapped else value)
        elif param is None or first[param] == name:  # a tied one is loaded by its first name
            same = value.dtype == targets[name].dtype
            source = value if same else reading.masters.get(name, value)
            to = locals_here[name]
            values = source if to is targets[name] else local_of(source)
            undo.callback(to.copy_, to.clone())
            to.copy_(rounded(values, to.dtype) if to.dtype in LOW_PRECISION else values)
            if to is not targets[name]:  # what was written is the memory below it
                torch.autograd.graph.increment_version(every[name])
        weights[name] = None


def masters(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """What each low-precision parameter's master is made from, by name and by entry of a state."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, param in named_params(model).items():
        record = _C.weight_of(param)
        if record is None or record.entry is None or not record.is_unwritten(param):
            continue
        master, *others = record.tensors
        if any(each.numel() for each in others):
            # A few float32 numbers beside remainders. Where a value is half way between two
            # weights, it is the number that rounds to this one.
            found[name] = {"master": _C.float32_master(param)}
        else:
            packed = MASTER_ENTRIES[record.entry] == torch.uint8
            shape = _C.second_shape(PACKED, param) if packed else None
            shown = like(master.detach(), param, shape)
            found[name] = {record.entry: as_bytes(shown) if master.dtype == torch.int16 else shown}
    return found


def way_back_of_masters(params: dict[str, Tensor]) -> Callable[[], None]:
    """A function that gives the parameters back the masters that they have now."""
    known = [(param, record) for param in params.values() if (record := _C.weight_of(param))]
    # Copies, because the load writes masters in place.
    states = [tree_map_only(Tensor, torch.clone, record.state(param)) for param, record in known]
    held = [(*pair, state) for pair, state in zip(known, states, strict=True)]

    def back() -> None:
        for param, record, state in held:
            if state is None:
                record.drop()
            else:
                record.set_state(param, state)

    return back


def keep_masters(model: nn.Module, optimizer: Optimizer | None, reading: Reading) -> None:
    """Gives low-precision parameters their float32 values, after everything else is loaded.

    Those of the optimizer become masters, unless its group has none. A prepared model keeps the
    others for the optimizer that takes its first step later, and drops those that it had.
    """
    for module in model.modules():
        kept_masters.follow_replaced(module, module._parameters)
    fused = optimizer if isinstance(optimizer, FusedOptimizer) else None
    stepped: set[Tensor] = set()
    alone: set[Tensor] = set()  # weights that the optimizer steps without a master
    if fused is not None:
        fused.init_state()  # torch's files lack what amp_mp keeps beside the step count
        stepped = {param for param in params_in(fused.param_groups) if param in fused.state}
        for group in fused.param_groups:
            if group["master"] == "none":
                alone.update(params_in([group]))
    for name, param in reading.params.items():
        if param.dtype not in LOW_PRECISION or name not in reading.weights:
            continue
        record = _C.weight_of(param)
        if param in alone:
            kept_masters.drop(param)
        elif record is not None and param in stepped and name in reading.masters:
            record.store(param, local_of(reading.masters[name]), exactly=False)
        elif record is not None and name in reading.masters:
            kept_masters.keep(param, reading.masters[name])
        elif param not in stepped:
            kept_masters.drop(param)
    if fused is not None:
        stepper_of(fused).forget()
