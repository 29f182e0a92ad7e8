"""Writes a checkpoint."""

import shutil
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from amp_mp.checkpoint.contents import PREVIOUS
from amp_mp.checkpoint.names import names_of_groups, refuse_sharded
from amp_mp.checkpoint.processes import all_or_none, is_first_process, quietly, understood
from amp_mp.checkpoint.structure import with_structure
from amp_mp.checkpoint.templates import EXTRA
from amp_mp.optim.base import FusedOptimizer

INCOMPLETE = ".incomplete"  # added to a checkpoint's name until all of it is written


def save(
    path: str | PathLike[str], model: nn.Module, optimizer: Optimizer | None = None, **more: Any
) -> None:
    """Writes a model, its optimizer and whatever else is named into one directory.

        amp.checkpoint.save("step_1000", model, optimizer, scheduler=scheduler, step=1000)

    Every process calls it with its shards; nothing is gathered. The directory is one of
    torch.distributed.checkpoint, {"model": ..., "optimizer": ..., name: ...}, with the names of the
    unwrapped model's parameters. It appears under its name when it is complete: an interrupted
    save leaves an earlier one as it was.

    Args:
        path: the directory, which all processes see; a checkpoint that is there is replaced.
        model: plain, or sharded by fully_shard or parallelize_module, in DistributedDataParallel or
            compiled.
        optimizer: of amp_mp or torch.optim, over the model's own parameters.
        more: numbers, strings, tensors, containers of them, or objects with a state_dict; the same
            on all processes, of which one writes it.

    Raises on all processes: TypeError or ValueError for an optimizer that is not over the model's
    parameters, FileExistsError where path is a file or a directory with other files in it, and
    RuntimeError where a process cannot write. If a process does not call it, the others wait for
    the process group's timeout.
    """
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    target = Path(path)
    partial = target.with_name(target.name + INCOMPLETE)
    weights: dict[str, Any] = {**get_model_state_dict(model)}  # puts back what FSDP2 has gathered
    with all_or_none():
        refuse_sharded(more)
        by_name = None if optimizer is None else named_state(model, optimizer)
        if is_first_process():
            _refuse_other_files(target)
            shutil.rmtree(partial, ignore_errors=True)
    for name, value in weights.items():
        if name.endswith(EXTRA) and isinstance(value, dict | list):
            weights[name] = (value,)  # stored as one value
    state: dict[str, Any] = {"model": weights}
    if by_name is not None:
        state["optimizer"] = by_name
    with all_or_none():
        kept = {n: v.state_dict() if hasattr(v, "state_dict") else v for n, v in more.items()}
        state = with_structure(state | kept, kept)
    try:
        quietly(state_dict_saver.save, state, checkpoint_id=partial)
    except BaseException as error:
        raise understood(error, f"{path} was not written") from error
    with all_or_none():
        if is_first_process():
            _put_in_place(target, partial)


def named_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
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


def _refuse_other_files(target: Path) -> None:
    """FileExistsError where something is there that is no checkpoint."""
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file; a checkpoint is a directory")
    own = (".metadata", ".distcp")
    found = sorted(target.iterdir()) if target.exists() else []
    others = [each.name for each in found if not each.name.endswith(own)]
    if others:
        raise FileExistsError(
            f"{target} holds {others[0]!r}, which is not of a checkpoint; saving would delete it. "
            "Name a directory of its own for each checkpoint"
        )


def _put_in_place(target: Path, partial: Path) -> None:
    """Puts the new checkpoint in the place of the earlier one, which is deleted last."""
    previous = target.with_name(target.name + PREVIOUS)
    if target.exists():
        shutil.rmtree(previous, ignore_errors=True)
        target.rename(previous)
    partial.rename(target)
    shutil.rmtree(previous, ignore_errors=True)
