"""Reads a checkpoint into a model and an optimizer that may be stored and split otherwise."""

from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from amp_mp.checkpoint.contents import Contents
from amp_mp.checkpoint.groups import check_has_optimizer, packed_state
from amp_mp.checkpoint.names import named_params, names_of_groups, refuse_sharded
from amp_mp.checkpoint.processes import all_or_none, quietly, understood
from amp_mp.checkpoint.structure import rebuilt
from amp_mp.checkpoint.templates import empty, model_template, state_template
from amp_mp.checkpoint.weights import float32_values, keep_masters, load_weights
from amp_mp.optim.state.schema import MASTER_ENTRIES


@torch.no_grad()
def load(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """Reads what `save`, or torch.distributed.checkpoint, wrote; on any number of processes.

        found = amp.checkpoint.load("step_1000", model, optimizer, scheduler=scheduler)
        step = found["step"]

    Weights and states of any of amp_mp's formats are read into any other. Of a file of
    torch.optim.AdamW and the like, float32 weights become the masters of low-precision parameters
    and their rounded values the parameters; the step count and the moments go on. Without an
    optimizer, a model from amp_mp.prepare keeps the file's float32 values, or its masters, for the
    optimizer that takes its first step later.

    Every process calls it and reads its own shards. For that it needs memory beside the model and
    the optimizer: the file's tensors of these shards and the new state, about twice their bytes;
    where formats or dtypes differ also float32 copies, up to three times. Nothing is read whole
    but small numbers, `more`, and states stored as `m8` or `log8` whose groups of 32 the shards
    would cut.

    Args:
        path: the directory. Load only files that you trust: `more` is unpickled.
        model, optimizer: as for `save`, in their own dtypes, formats and shards.
        strict: True raises ValueError where the model or the optimizer has a tensor that the file
            lacks, or the other way round. False leaves out what only one of them has. A parameter
            without any state in the file has taken no step.
        more: objects with load_state_dict (schedulers, scalers), by the names they were saved with.
            Modules are loaded before the others.

    Returns what else is in the file, by name; state dicts of the objects in `more` too.
    Raises on all processes, with nothing changed: FileNotFoundError where there is no complete
    checkpoint, ValueError naming what is missing or of another shape or group, TypeError for an
    object that cannot be loaded, RuntimeError where a process cannot read its part.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    targets = get_model_state_dict(model)  # puts back what FSDP2 has gathered
    with all_or_none():
        params = named_params(model)
        contents = Contents(path, params)
        groups = [] if optimizer is None else names_of_groups(model, optimizer)
        names = {name for group in groups for name in group}
        _check_more(contents, more)
        template = model_template(contents, targets, strict)
        if optimizer is not None:
            check_has_optimizer(contents, names, strict)
        states = {
            name: state_template(contents, name, param, None if name in names else MASTER_ENTRIES)
            for name, param in params.items()
        }
        others = [*contents.others(), *(contents.groups() if groups else ())]
        values = template | {key: empty(contents, key) for key in others}
        for name, state in states.items():
            values |= {contents.states[name][entry]: value for entry, value in state.items()}
    try:
        quietly(state_dict_loader.load, values, checkpoint_id=path)
    except BaseException as error:
        raise understood(error, f"{path} could not be read; nothing was loaded") from error
    with all_or_none():
        weights = {n: values[k] for n in targets if (k := contents.weight(n)) in template}
        states = {
            name: {entry: values[contents.states[name][entry]] for entry in state}
            for name, state in states.items()
        }
        masters = float32_values(params, weights, states, names)
        packed = None
        if optimizer is not None:  # keep_masters sets those that have float32 values
            own = {name: MASTER_ENTRIES if name in masters else () for name in names}
            kept = {n: {k: v for k, v in states[n].items() if k not in own[n]} for n in names}
            packed = packed_state(contents, values, optimizer, groups, kept, strict)
        found = rebuilt(contents, {key: values[key] for key in contents.others()})
    del values, states

    load_weights(model, targets, weights, masters)
    if optimizer is not None and packed is not None:
        absent = [param for name, param in params.items() if name in names - weights.keys()]
        before = {param: optimizer.state[param] for param in absent if param in optimizer.state}
        optimizer.load_state_dict(packed)
        optimizer.state.update(before)
    keep_masters(model, optimizer, weights, masters)
    for name, each in sorted(more.items(), key=lambda item: not isinstance(item[1], nn.Module)):
        each.load_state_dict(found.get(name, {}))
    return found


def _check_more(contents: Contents, more: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError for an object that nothing can be loaded into."""
    refuse_sharded(dict(more))
    for name, each in more.items():
        if not callable(getattr(each, "load_state_dict", None)):
            raise TypeError(
                f"{name} has no load_state_dict; what was saved under this name is in the dict "
                "that load returns"
            )
        empty_here = hasattr(each, "state_dict") and not each.state_dict()  # a disabled GradScaler
        if name not in contents.parts and not empty_here:
            raise ValueError(
                f"the checkpoint has no part named {name!r}; it has "
                f"{', '.join(sorted(contents.parts))}; nothing was loaded"
            )
