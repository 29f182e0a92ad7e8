"""Torch's save and load, and the errors that all processes raise alike."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


def is_distributed() -> bool:
    """Whether there are other processes to save and load with."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def this_rank() -> int:
    """This process's number; 0 where it is the only one."""
    return torch.distributed.get_rank() if is_distributed() else 0


def number_of_processes() -> int:
    """How many processes save and load together."""
    return torch.distributed.get_world_size() if is_distributed() else 1


@contextmanager
def all_or_none() -> Iterator[list[Any]]:
    """Raises on every process where the block raises on any; returns when every process is here.

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
    found, told[:] = _gathered(own, told)
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
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            action(state, no_dist=alone or not is_distributed(), checkpoint_id=path)
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


def _gathered(own: Exception | None, told: list[Any]) -> tuple[list[Exception | None], list[Any]]:
    if not is_distributed():
        return [own], told
    # The nearest of Python's own classes, which take one string.
    kinds = (FileNotFoundError, FileExistsError, OSError, TypeError, ValueError)
    kind = next((kind for kind in kinds if isinstance(own, kind)), RuntimeError)
    found: list[Any] = [None] * torch.distributed.get_world_size()
    try:
        mine = (None, told) if own is None else ((kind, str(own)), [])
        torch.distributed.all_gather_object(found, mine)
    except RuntimeError as error:
        error.add_note(
            "every process has to call amp_mp.checkpoint.save and load; here one did not, or ended "
            "before"
        )
        raise
    errors = [None if each is None else each[0](each[1]) for each, _ in found]
    return errors, [each for _, every in found for each in every]
