"""Writes a checkpoint, and reads it into a model that may be stored and split otherwise."""

import copy
import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_mp import _C
from amp_mp.checkpoint import local_part, model_part, optimizer_part, pending, places
from amp_mp.checkpoint.contents import (
    PREVIOUS,
    Contents,
    empty_like,
    rebuilt,
    with_structure,
)
from amp_mp.checkpoint.pending import PendingSave
from amp_mp.checkpoint.processes import (
    all_or_none,
    background_group,
    needs,
    run,
    this_rank,
    write_in_background,
)
from amp_mp.checkpoint.reading import Reading
from amp_mp.param_groups import params_in
from amp_mp.sharding.shards import is_dtensor
from amp_mp.torch_private import EXTRA_STATE

INCOMPLETE = ".incomplete"  # added to a checkpoint's name until all of it is written
MARK = ".amp_mp_saving"  # a file in directories that an unfinished save may delete
OWN = re.compile(r"\.metadata(\.tmp)?|__\d+_\d+\.distcp|" + re.escape(MARK))


def save(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    wait: bool = True,
    **more: Any,
) -> PendingSave:
    """Writes a model, its optimizer and whatever else is named into one directory.

        amp.checkpoint.save("step_1000", model, optimizer, scheduler=scheduler, step=1000)

    Every process calls it with its shards; nothing is gathered. The directory is one of
    torch.distributed.checkpoint, {"model": ..., "optimizer": ..., name: ...}, with the names of the
    unwrapped model's parameters. It appears under its name when it is complete: an interrupted
    save leaves an earlier one as it was. Parameters that differ between processes under one name,
    by their param_group's process_groups or by their bytes, are written for each.

    Args:
        path: the directory, or a symbolic link to it, which all processes see; a checkpoint that is
            there is replaced.
        model: plain, or sharded by fully_shard or parallelize_module, in DistributedDataParallel,
            DataParallel or compiled.
        optimizer: one of amp_mp or torch.optim over the model's own parameters, or Accelerate's
            around one. Without it the bits that rounding cut off from the weights are saved all the
            same, and `load` of a prepared model keeps them.
        wait: False returns as soon as everything is copied to the host's memory, which takes as
            many bytes as the files; a thread writes the copy while training goes on. The
            checkpoint has what was there at the call. The next `save` or `load`, and the end of
            the process, wait for it. Call the result's `wait()` before
            torch.distributed.destroy_process_group(). The same on all processes.
        more: numbers, strings, tensors, containers of them, or objects with a state_dict; the same
            on all processes. One process writes it, but for parameters of modules.

    Returns a PendingSave: `wait()` returns when the checkpoint is complete, `done()` says whether
    it is. An error of a save with wait=False is raised by its `wait()`, else by the next `save` or
    `load`, else printed when the process ends.

    Raises on all processes: TypeError or ValueError for an optimizer that is not over the model's
    parameters, and for one in `more` whose parameters differ between processes; FileExistsError
    where path is a file or a directory with other files in it, or where path with .incomplete or
    .previous exists and no save has made it; RuntimeError where a process cannot write, where the
    save before failed, and while a CUDA graph is captured. If a process does not call it, the
    others wait for the process group's timeout.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("checkpoint.save() cannot be captured by a CUDA graph; call it outside")
    from torch.distributed.checkpoint import state_dict_saver

    target, optimizer = Path(os.path.realpath(path)), optimizer_part.innermost(optimizer)
    unfinished, previous = (target.with_name(target.name + end) for end in (INCOMPLETE, PREVIOUS))
    weights, rank, failed = model_part.state_of(model), this_rank(), f"{path} was not written"
    with all_or_none() as waits:
        if not isinstance(wait, bool):
            raise TypeError(f"wait must be True or False, found {wait!r}; what is saved has names")
        waits.append(wait)
        pending.wait_for_last()  # its thread needs none of the others' calls
        for each in (model, *(each for each in more.values() if isinstance(each, nn.Module))):
            _C.refuse_borrowed(each.parameters(), "checkpoint.save()", reads=True)
        optimizer_part.refuse_sharded(more)
        state: dict[str, Any] = {"model": weights}
        if optimizer is not None:
            state["optimizer"] = optimizer_part.named_state(model, optimizer)
        elif masters := model_part.masters(model):
            state["optimizer"] = {"state": masters}
        if rank == 0:
            _refuse_other_files(target)
            _refuse_other_files(unfinished, kept=True)
            _refuse_other_files(previous, kept=True)
            _delete(unfinished)
            unfinished.mkdir(parents=True)
            (unfinished / MARK).touch()
    if len({*waits}) > 1:
        raise ValueError(f"wait must be the same on all processes; by rank it is {waits}")
    for name, value in weights.items():
        if name.endswith(EXTRA_STATE) and isinstance(value, dict | list):
            weights[name] = (value,)  # stored as one value
    with all_or_none() as told:
        kept = {n: v.state_dict() if hasattr(v, "state_dict") else v for n, v in more.items()}
        state = with_structure(state | kept, kept)
        told.append(local_part.told(model, optimizer, state, more))
    local_part.set_apart(state, told)

    def put_in_place(group: Any = None) -> None:
        with all_or_none(group):
            if rank == 0:
                _put_in_place(target, unfinished, previous)

    if wait:
        run(state_dict_saver.save, state, unfinished, failed)
        put_in_place()
        return pending.complete(path)
    with all_or_none():
        state = pending.copied(state)
    group = background_group()

    def write() -> None:
        with needs(group, failed):
            try:
                write_in_background(state, unfinished, failed, group)
            finally:
                state.clear()  # the thread of a failed save stays
            put_in_place(group)

    return pending.start(path, write)


def _refuse_other_files(folder: Path, kept: bool = False) -> None:
    """FileExistsError where something is there that `save` did not make.

    kept: whether saves alone keep something there.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        kind = "symbolic link" if folder.is_symlink() else "file"
        raise FileExistsError(f"{folder} is a {kind}; a checkpoint is a directory")
    found = sorted(folder.glob("*"))
    others = [f.name for f in found if not OWN.fullmatch(f.name) or f.is_symlink() or f.is_dir()]
    if others or (kept and found and folder / MARK not in found):
        what = "holds {!r}, which is not of a checkpoint" if others else "is of no unfinished save"
        raise FileExistsError(
            f"{folder} {what.format(*others)}; saving would delete it. "
            "Name a directory of its own for each checkpoint"
        )


def _delete(folder: Path) -> None:
    for file in sorted(folder.glob("*"), key=lambda f: (f.name == MARK, f)):
        file.unlink()
    if folder.exists():
        folder.rmdir()


def _put_in_place(target: Path, unfinished: Path, previous: Path) -> None:
    """Puts the new checkpoint in the place of the earlier one, which is deleted last."""
    _refuse_other_files(target)
    if (target / ".metadata").exists():
        _delete(previous)
        (target / MARK).touch()
        target.rename(previous)
    _delete(target)
    unfinished.rename(target)
    (target / MARK).unlink()
    _delete(previous)


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

    Weights and states of any of amp_mp's formats are read into any other. From a file of
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
            lacks, or the file one that no process has. False leaves out what only one of them has.
            A parameter without any state in the file has taken no step.
        more: objects with load_state_dict (schedulers, scalers), by the names they were saved with.
            Modules are loaded before the others.

    Returns what else is in the file, by name; state dicts of the objects in `more` too.
    Waits for a save with wait=False. Raises on all processes, with nothing changed: RuntimeError
    where that save failed, FileNotFoundError where there is no complete
    checkpoint, ValueError naming what is missing, of another shape or group, or differs between
    processes and is held otherwise here, TypeError for an
    object that cannot be loaded, RuntimeError where a process cannot read its part.
    """
    optimizer = optimizer_part.innermost(optimizer)
    targets = model_part.state_of(model)
    with all_or_none() as told:
        pending.wait_for_last()
        params = model_part.named_params(model)
        _C.refuse_borrowed(params.values(), "checkpoint.load()")
        contents = Contents(path, params)
        groups = [] if optimizer is None else optimizer_part.names_of_groups(params, optimizer)
        _refuse_other_layout(contents, params, optimizer, more)
        _check_more(contents, more)
        names = {name for own in groups for name in own}
        weights = model_part.template(contents, targets, strict)
        if optimizer is not None:
            optimizer_part.check_has_optimizer(contents)
        # What the others have is no surplus: each process may have parameters of its own.
        told.append((model_part.beside(contents, targets), optimizer_part.beside(contents, names)))
        given = [] if optimizer is None else optimizer.param_groups
        away = {*params_in(group for group in given if group.get("offload"))}
        template = partial(optimizer_part.template, contents)
        states = {n: template(n, p, n not in names, p in away) for n, p in params.items()}
        others = [*contents.others, *(contents.groups if groups else ())]
        rest = contents.empty(others) | (_shards_of(contents, more) if more else {})
        reading = Reading(contents, params, targets, groups, names, weights, states, rest)
    if strict:
        surplus, other_states = (set.intersection(*each) for each in zip(*told, strict=True))
        model_part.refuse_any(surplus, "in the model")
        optimizer_part.refuse_others(other_states if optimizer is not None else set())
    reading.read(Path(path))
    with all_or_none():
        reading.masters = model_part.float32_values(reading)
        packed = None
        if optimizer is not None:
            packed = optimizer_part.packed_state(reading, optimizer, strict)
        found = rebuilt(contents, {key: reading.others[key] for key in contents.others})
    reading.states.clear()  # masters that became float32 values are in memory no longer
    with ExitStack() as undo:
        with all_or_none():
            undo.callback(model_part.way_back_of_masters(params))
            model_part.load_weights(model, reading, undo)
            if optimizer is not None and packed is not None:
                absent = reading.names - reading.weights.keys()
                before = {
                    p: optimizer.state[p]
                    for n, p in params.items()
                    if n in absent and p in optimizer.state
                }
                held = dict(vars(optimizer), defaults=dict(optimizer.defaults))
                undo.callback(vars(optimizer).update, held)
                optimizer_part.load_checked(optimizer, packed)
                optimizer.state.update(before)
            in_turn = sorted(more.items(), key=lambda item: not isinstance(item[1], nn.Module))
            for name, each in in_turn:
                undo.callback(_way_back(each))
                try:
                    each.load_state_dict(found.get(name, {}))
                except (LookupError, TypeError, ValueError, AttributeError) as error:
                    wrong = f"cannot load what the checkpoint has ({type(error).__name__}: {error})"
                    raise ValueError(f"{name} {wrong}; nothing was loaded") from error
            model_part.keep_masters(model, optimizer, reading)
        undo.pop_all()  # nothing is to be undone
    return found


def _refuse_other_layout(
    contents: Contents,
    params: Mapping[str, Tensor],
    optimizer: Optimizer | None,
    more: Mapping[str, Any],
) -> None:
    """ValueError for a parameter that each process had for itself, and that is not here alike."""
    tensors = {f"model.{name}": (name, param) for name, param in params.items()}
    tensors |= {f"optimizer.state.{name}": (name, param) for name, param in params.items()}
    for item, each in more.items():
        own = each.named_parameters() if isinstance(each, nn.Module) else ()
        tensors |= {f"{item}.{name}": (f"{item}.{name}", param) for name, param in own}
    places.refuse_other_layout(contents.places, tensors, places.groups_of(optimizer))


def _shards_of(contents: Contents, more: Mapping[str, Any]) -> dict[str, Tensor]:
    """By key, a tensor to read into for each DTensor of the modules in `more`, split as it is."""
    found: dict[str, Tensor] = {}
    for item, each in more.items():
        own = each.state_dict() if isinstance(each, nn.Module) else {}
        for name, value in own.items():
            entry = contents.tensors.get(f"{item}.{name}")
            if entry is not None and is_dtensor(value) and entry.size == value.shape:
                found |= empty_like(value, {f"{item}.{name}": entry.properties.dtype})
    return found


def _way_back(each: Any) -> Callable[[], None]:
    """A function that gives an object back the state that it has now."""
    own = getattr(each, "__dict__", {})
    held = dict(own), copy.deepcopy(each.state_dict()) if hasattr(each, "state_dict") else None

    def back() -> None:
        if held[1] is not None:
            each.load_state_dict(held[1])
        own.clear()
        own.update(held[0])

    return back


def _check_more(contents: Contents, more: Mapping[str, Any]) -> None:
    optimizer_part.refuse_sharded(dict(more))
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
