"""Torch's save and load, and the errors that all processes raise alike."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from amp_mp.torch_private import save_state_dict

ALONE: Any = object()  # in place of a process group: this process needs no others


def is_distributed() -> bool:
    """Whether there are other processes to save and load with."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def this_rank() -> int:
    """This process's number; 0 where it is the only one."""
    return torch.distributed.get_rank() if is_distributed() else 0


def number_of_processes() -> int:
    """How many processes save and load together."""
    return torch.distributed.get_world_size() if is_distributed() else 1


_groups = WeakKeyDictionary[Any, Any]()  # by torch's default group, that of `background_group`


def background_group() -> Any:
    """The processes' group for a thread beside training, or ALONE. All have to call it.

    One of its own, because training's collectives come in between; gloo, because the thread has
    nothing on a GPU.
    """
    if number_of_processes() == 1:
        return ALONE
    default = torch.distributed.group.WORLD
    if default not in _groups:
        _groups[default] = torch.distributed.new_group(backend="gloo")
    return _groups[default]


@contextmanager
def all_or_none(group: Any = None) -> Iterator[list[Any]]:
    """Raises on every process where the block raises on any; returns when every process is here.

    group: None for torch's default one.

    The block gets a list. What it puts there the other processes are told: after the block the list
    has what each process has put there, in the order of the ranks.

    The process whose block failed raises its own error, the others the first rank's. The block must
    not wait for other processes. Where a process never gets here, the others wait until the process
    group's timeout and raise an error that says so.
    """
    own: Exception | None = None
    told: list[Any] = []
    try:
        yield told
    except Exception as error:
        own = error
    found, told[:] = _gathered(own, told, group)
    if own is not None:
        raise own
    for rank, other in enumerate(found):
        if other is not None:
            other.add_note(f"Raised on rank {rank}.")
            raise other


def run(
    action: Callable[..., Any], state: dict[str, Any], path: Path, failed: str, alone: bool = False
) -> None:
    """Calls torch's save or load, without its warning that there is one process only.

    alone: whether the other processes do not call it. All that do raise a CheckpointException, no
    Exception, where one cannot read or write; it becomes a RuntimeError that begins with `failed`.
    """
    with warnings.catch_warnings(), _named(failed):
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        action(state, no_dist=alone or not is_distributed(), checkpoint_id=path)


def write_in_background(state: dict[str, Any], path: Path, failed: str, group: Any) -> None:
    """torch's save of a state in the host's memory, in a thread beside training.

    Processes that are no longer in the group raise: torch's public function would take each for the
    only one. It also warns, and filters of warnings are the training thread's.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    with _named(failed):
        # Copying ahead would wait for a stream of the GPU that is this thread's current one.
        writer = FileSystemWriter(path, per_thread_copy_ahead=0)
        own = None if group is ALONE else group
        save_state_dict(state, writer, own, no_dist=group is ALONE)


@contextmanager
def needs(group: Any, failed: str) -> Iterator[None]:
    """Names destroy_process_group() where that is why the block could not reach the others."""
    try:
        yield
    except Exception as error:
        if group is ALONE or is_distributed():
            raise
        why = "torch.distributed.destroy_process_group() was called before it was complete"
        raise RuntimeError(f"{failed}: {why}; call wait() of what save returned first") from error


@contextmanager
def _named(failed: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        failures = getattr(error, "failures", None)
        if not isinstance(failures, dict):
            raise
        rank, (cause, _) = next(iter(failures.items()))
        if not isinstance(cause, Exception):
            raise  # KeyboardInterrupt
        # On a full disk torch raises an "enforce fail", after the system's own error.
        cause = cause.__context__ if isinstance(cause.__context__, OSError) else cause
        text = f"{failed}: rank {rank} raised {type(cause).__name__}: {cause}"
        raise RuntimeError(text) from error


def _gathered(
    own: Exception | None, told: list[Any], group: Any
) -> tuple[list[Exception | None], list[Any]]:
    if group is ALONE or (group is None and not is_distributed()):
        return [own], told
    # The nearest of Python's own classes, which take one string.
    kinds = (FileNotFoundError, FileExistsError, OSError, TypeError, ValueError)
    kind = next((kind for kind in kinds if isinstance(own, kind)), RuntimeError)
    try:
        found: list[Any] = [None] * torch.distributed.get_world_size(group)
        mine = (None, told) if own is None else ((kind, str(own)), [])
        torch.distributed.all_gather_object(found, mine, group)
    except RuntimeError as error:
        error.add_note(
            "every process has to call amp_mp.checkpoint.save and load; here one did not, or ended "
            "before"
        )
        raise
    errors = [None if each is None else each[0](each[1]) for each, _ in found]
    return errors, [each for _, every in found for each in every]
