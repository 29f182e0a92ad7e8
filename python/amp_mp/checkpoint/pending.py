"""The save under way beside training: the copy that it writes, its thread, and its error."""

import copy
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.sharding.shards import like, local_of
from amp_mp.torch_private import flatten_state_dict


class PendingSave:
    """A checkpoint that `save` writes.

    Without a `wait`, the next `save` or `load` waits for it and raises its error, and so does the
    end of the process, which prints the error.
    """

    def __init__(self, path: Any) -> None:
        self._path = path
        self._ended, self._told = threading.Event(), threading.Event()
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        failed = "failed" if self._error else "complete"
        return f"<PendingSave of {self._path}: {failed if self.done() else 'under way'}>"

    def done(self) -> bool:
        """Whether it has ended: the checkpoint is under its name, or `wait` raises at once."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Returns when the checkpoint is complete and under its name.

        Raises, on all processes, RuntimeError where one could not write, FileExistsError where
        something else is there by now. The earlier checkpoint is then as it was.
        """
        self._ended.wait()
        if self._error is not None:
            self._told.set()
            raise self._error

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            _forget_frames(error)
            self._error = error
        self._ended.set()
        while self._error is not None and not self._told.wait(0.1):
            if not threading.main_thread().is_alive():  # nobody can ask any more
                print(f"amp_mp: {type(self._error).__name__}: {self._error}", file=sys.stderr)
                break


_last: list[PendingSave] = []
os.register_at_fork(after_in_child=_last.clear)  # its thread is the parent's


def start(path: Any, write: Callable[[], None]) -> PendingSave:
    """Calls the function in a thread, which the end of the process waits for."""
    pending = PendingSave(path)
    threading.Thread(target=pending._run, args=[write], name="amp_mp save", daemon=False).start()
    _last[:] = [pending]
    return pending


def complete(path: Any) -> PendingSave:
    """One that has ended."""
    pending = PendingSave(path)
    pending._ended.set()
    return pending


def wait_for_last() -> None:
    """Waits for the save under way; RuntimeError if it fails and no `wait` has raised that."""
    for pending in _last:
        untold = not pending._told.is_set()
        try:
            pending.wait()
        except Exception as error:
            if untold:
                text = f"the save before this call failed, and the call has done nothing: {error}"
                raise RuntimeError(text) from error


@torch.no_grad()
def copied(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of a state to save: tensors in memory of the host, of their exact size.

    What has the same memory is copied once. torch would copy a tensor that is part of a larger
    storage again, and keep it until all is written.
    """
    leaves = {id(x): x for x in flatten_state_dict(state).values() if isinstance(x, Tensor)}
    plain: dict[Any, tuple[Tensor, list[Tensor]]] = {}
    copies: dict[int, Any] = {}
    for number, leaf in leaves.items():
        local = local_of(leaf).detach()
        if type(local) is not Tensor or local.layout != torch.strided or local.is_meta:
            copies[number] = leaf.detach().clone()
            continue
        place = local.device, local.data_ptr(), local.dtype, local.shape, local.stride()
        plain.setdefault(place, (local, []))[1].append(leaf)
    made = _C.copies_on_host([local for local, _ in plain.values()])
    for copy_of, (_, own) in zip(made, plain.values(), strict=True):
        copies |= {id(leaf): like(copy_of, leaf) for leaf in own}
    return copy.deepcopy(state, copies)


def _forget_frames(error: BaseException) -> None:
    """Frees the copy, which torch's frames have; torch's text says where they were."""
    chain: list[Any] = [error]
    for each in chain:
        each.__traceback__ = None
        causes = [cause for cause, _ in getattr(each, "failures", {}).values()]
        chain += [e for e in (each.__cause__, each.__context__, *causes) if e and e not in chain]
