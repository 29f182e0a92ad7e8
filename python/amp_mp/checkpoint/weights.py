"""Weights from a file, in its dtypes, into a model and into the masters of its parameters."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_mp.checkpoint.names import named_params, unwrapped, without_wrappers
from amp_mp.checkpoint.templates import EXTRA
from amp_mp.dtypes import LOW_PRECISION, rounded
from amp_mp.model.original_values import (
    awaits_original,
    drop_original,
    follow_sharding,
    keep_original,
)
from amp_mp.optim.base import FusedOptimizer, stepper_of
from amp_mp.optim.state.masters import master_of, set_master
from amp_mp.optim.state.schema import MASTER_ENTRIES, copy_of
from amp_mp.sharding.shards import is_dtensor, like, local_of


def float32_values(
    params: dict[str, Tensor],
    weights: dict[str, Any],
    states: dict[str, dict[str, Any]],
    restored: set[str],
) -> dict[str, Tensor]:
    """This process's float32 values of the weights that the file and a master may hold otherwise.

    By name, for all weights but those that are the same bits in the file and in the parameter:
    float32 in both, or low-precision beside a master that the optimizer's load_state_dict reads.
    restored: the names of the optimizer's parameters.
    """
    found = {}
    for name, param in params.items():
        if name not in weights:
            continue
        weight = local_of(weights[name])
        masters = {
            entry: copy_of(local_of(value), MASTER_ENTRIES[entry].dtype, weight)
            for entry, value in states[name].items()
            if entry in MASTER_ENTRIES and value is not None
        }
        low = weight.dtype in LOW_PRECISION
        if weight.dtype == param.dtype and (not low or (masters and name in restored)):
            continue
        values = master_of(weight, masters) if low else None
        found[name] = weight.float() if values is None else values
    return found


def load_weights(
    model: nn.Module, targets: dict[str, Any], weights: dict[str, Any], masters: dict[str, Tensor]
) -> None:
    """Copies a file's parameters and buffers into the model, and the extra state of its modules.

    targets: the model's state dict. masters: float32 values, by name, for weights whose dtype in
    the file is not that of the parameter.
    """
    first = {param: name for name, param in named_params(model).items()}
    every = named_params(model, every_name=True)
    modules = {without_wrappers(name): m for name, m in unwrapped(model).named_modules()}
    for name, value in weights.items():
        param = every.get(name)
        if name.endswith(EXTRA):
            module = modules[name.removesuffix(EXTRA).rstrip(".")]
            wrapped = isinstance(value, tuple) and len(value) == 1
            module.set_extra_state(value[0] if wrapped else value)
        elif param is None or first[param] == name:  # a tied one is loaded by its first name
            same = value.dtype == targets[name].dtype
            source = value if same else masters.get(name, value)
            to, values = local_of(targets[name]), local_of(source)
            to.copy_(rounded(values, to.dtype) if to.dtype in LOW_PRECISION else values)
            if is_dtensor(param):  # what was written is the memory below it
                torch.autograd.graph.increment_version(every[name])


def keep_masters(
    model: nn.Module,
    optimizer: Optimizer | None,
    weights: dict[str, Any],
    masters: dict[str, Tensor],
) -> None:
    """Gives low-precision parameters their float32 values, after everything else is loaded.

    Those of the optimizer become masters. A prepared model keeps the others for the optimizer that
    takes its first step later, and drops those that it had.
    """
    for module in model.modules():
        names = {n for n, p in module.named_parameters(recurse=False)}
        follow_sharding(module, names)
    fused = optimizer if isinstance(optimizer, FusedOptimizer) else None
    groups: dict[Tensor, dict[str, Any]] = {}
    if fused is not None:
        fused.init_state()  # torch's files lack what amp_mp keeps beside the step count
        groups = {param: group for group in fused.param_groups for param in group["params"]}
    for name, param in named_params(model).items():
        if param.dtype not in LOW_PRECISION or name not in weights:
            continue
        if fused is not None and param in groups and param in fused.state:
            if name in masters:
                master = like(masters[name], param)
                set_master(groups[param]["master"], param, fused.state[param], master)
            drop_original(param, forget=True)
        elif awaits_original(param):
            if name in masters:
                keep_original(param, like(masters[name], param))
            else:
                drop_original(param)
    if fused is not None:
        stepper_of(fused).forget()
