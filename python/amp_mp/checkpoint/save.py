"""Writes a checkpoint."""

import shutil
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from amp_mp.checkpoint.names import names_of_groups
from amp_mp.optim.base import FusedOptimizer


def save(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    **more: Any,
) -> None:
    """Writes a model, its optimizer and whatever else is named into one directory.

        amp.checkpoint.save("step_1000", model, optimizer, scheduler=scheduler, step=1000)

    Every process calls it with its shards; nothing is gathered. The directory is one of
    torch.distributed.checkpoint, {"model": ..., "optimizer": ..., name: ...}, with the names of the
    unwrapped model's parameters. It appears under its name when it is complete: an interrupted
    save leaves an earlier one as it was.

    Args:
        path: the directory; one that is there already is replaced.
        model: plain, or sharded by fully_shard or parallelize_module, in DistributedDataParallel or
            compiled.
        optimizer: of amp_mp or torch.optim, over the model's own parameters.
        more: numbers, strings, tensors, containers of them, or objects with a state_dict.

    Raises TypeError or ValueError for an optimizer that is not over the model's parameters.
    """
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = by_name(model, optimizer)
    for name, value in more.items():
        state[name] = value.state_dict() if hasattr(value, "state_dict") else value
    target = Path(path)
    partial = target.with_name(f"{target.name}.incomplete")
    if is_first_process():
        shutil.rmtree(partial, ignore_errors=True)
    wait_for_all()
    state_dict_saver.save(state, checkpoint_id=partial, no_dist=not is_distributed())
    if is_first_process():
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    wait_for_all()


def by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state dict with names in place of numbers, as torch's checkpoints have it."""
    names = names_of_groups(model, optimizer)
    if isinstance(optimizer, FusedOptimizer):
        optimizer.init_state()  # what has had no gradient yet is in the file, too
    packed = optimizer.state_dict()
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    name_of = dict(zip(numbers, [name for group in names for name in group], strict=True))
    groups = zip(packed["param_groups"], names, strict=True)
    return {
        "state": {name_of[number]: state for number, state in packed["state"].items()},
        "param_groups": [{**group, "params": own} for group, own in groups],
    }


def is_distributed() -> bool:
    """Whether there are other processes to save and load with."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_first_process() -> bool:
    """Whether this is rank 0, or the only process."""
    return not is_distributed() or torch.distributed.get_rank() == 0


def wait_for_all() -> None:
    """Returns when every process is here."""
    if is_distributed():
        torch.distributed.barrier()
