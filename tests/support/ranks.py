"""Runs a function in several processes that share one process group: `on_ranks(4, function, ...)`.

The processes of each number of ranks are started once in a pytest process and serve every call.
Tests that use them carry pytest.mark.xdist_group("distributed"), so that pytest-xdist runs them in
one worker.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib.util
import io
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LARGE = "AMP_MP_DISTRIBUTED" in os.environ  # make test-distributed: all cases
LIMIT_S = 60.0  # for a call, if it names no other
AFTER_AN_ERROR_S = 1.0  # how long the other ranks may take to report theirs
# Imported once, in the process from which the ranks are forked.
PRELOAD = ["torch.distributed.tensor.parallel", "torch.distributed.fsdp", "amp_mp", "pytest"]
_pools: dict[int, Pool] = {}


def on_ranks(
    world: int, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S, **kwargs: Any
) -> list[Any]:
    """Calls function(*args, **kwargs) in each of `world` processes; returns their results in order.

    function: of the top level of a module; the ranks import the file that defines it. Arguments and
    results are pickled; plain tensors may be among them, DTensors may not. Every call starts with
    the same random seed.

    Raises the exception of the rank that failed first, with a note that has the rank and its
    traceback; TimeoutError, with what each rank was doing, for ranks that do not answer in limit_s.
    The processes are replaced after either, because the ranks that did not fail may be waiting in a
    collective for ever.
    """
    if world not in _pools:
        _pools[world] = Pool(world)
    try:
        return _pools[world].call(function, args, kwargs, limit_s)
    except BaseException:
        _pools.pop(world).kill()
        raise


class Pool:
    """Processes that are the ranks of one process group."""

    def __init__(self, world: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        os.environ["OMP_NUM_THREADS"] = "1"
        self.folder = tempfile.TemporaryDirectory(prefix="ranks")
        self.processes, self.pipes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (rank, world, self.folder.name, theirs)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def call(self, function: Any, args: Any, kwargs: Any, limit_s: float) -> list[Any]:
        """See on_ranks."""
        file = sys.modules[function.__module__].__file__
        request = packed((file, function.__qualname__, args, kwargs))
        for pipe in self.pipes:
            pipe.send_bytes(request)
        answers: dict[int, Any] = {}
        until = time.monotonic() + limit_s
        failed: list[tuple[int, BaseException, str]] = []
        while len(answers) < len(self.pipes):
            missing = {pipe: r for r, pipe in enumerate(self.pipes) if r not in answers}
            ready = wait(list(missing), max(0.0, until - time.monotonic()))
            if not ready and not failed:
                raise TimeoutError(self.describe_hang(function, limit_s, sorted(missing.values())))
            if not ready:
                break
            for pipe in ready:
                rank = missing[pipe]
                answers[rank], error = self.receive(rank, pipe)
                if error is not None:
                    failed.append((rank, *error))
                    until = min(until, time.monotonic() + AFTER_AN_ERROR_S)
        if failed:
            rank, error, text = failed[0]
            others = [r for r, *_ in failed[1:]]
            error.add_note(f"Raised on rank {rank}, later on the ranks {others}:\n{text}")
            raise error
        return [answers[rank] for rank in range(len(self.pipes))]

    def receive(self, rank: int, pipe: Connection) -> tuple[Any, tuple[BaseException, str] | None]:
        """A rank's result and None, or None and what went wrong there."""
        try:
            return unpacked(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(1)
            code = self.processes[rank].exitcode
            return None, (RuntimeError(f"the process of rank {rank} ended with {code}"), "")

    def describe_hang(self, function: Any, limit_s: float, missing: list[int]) -> str:
        """Which ranks have not answered, and their stacks."""
        for rank in missing:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)
        stacks = [f"rank {r}:\n{Path(self.folder.name, f'stack{r}').read_text()}" for r in missing]
        return "\n".join(
            [f"{function.__qualname__}: the ranks {missing} have not ended in {limit_s} s", *stacks]
        )

    def kill(self) -> None:
        """Ends the processes, whatever they are doing."""
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.folder.cleanup()


@atexit.register
def kill_all() -> None:
    """Ends the processes of all pools."""
    while _pools:
        _pools.popitem()[1].kill()


def serve(rank: int, world: int, folder: str, pipe: Connection) -> None:
    """What each process does: answers calls until the pipe is closed."""
    torch.set_num_threads(1)
    with open(Path(folder, f"stack{rank}"), "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        init = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
        while True:
            try:
                request = pipe.recv_bytes()
            except EOFError:
                os._exit(0)  # a tidy end may hang: distributed.leave
            pipe.send_bytes(answer(request))


def answer(request: bytes) -> bytes:
    """The packed result and None, or None and the exception with its traceback."""
    try:
        file, name, args, kwargs = unpacked(request)
        torch.manual_seed(0)
        return packed((getattr(module_of(file), name)(*args, **kwargs), None))
    except BaseException as error:  # CheckpointException of torch is none of Exception's
        text = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return packed((None, (error.with_traceback(None), text)))


_names = itertools.count()


@cache
def module_of(file: str) -> Any:
    """The module that a file defines; one that was imported by its name already, or by its path."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == file:
            return module
    spec = importlib.util.spec_from_file_location(f"{Path(file).stem}_{next(_names)}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)
