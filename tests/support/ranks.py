"""Runs a function in several processes that share one process group: `on_ranks(4, function, ...)`.

A pytest process starts four of them, once; they serve every call, of which one with fewer ranks
uses the first of them. Tests that use them carry pytest.mark.xdist_group("distributed"), so that
pytest-xdist runs them in one worker.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
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
import warnings
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from leftovers import global_state, restore
from torch.distributed import distributed_c10d as c10d

from amp_mp import _C

LARGE = bool(os.environ.get("AMP_MP_DISTRIBUTED"))  # make test-distributed: all cases
LIMIT_S = 120.0  # for a call, if it names no other
AFTER_AN_ERROR_S = 1.0  # how long the other ranks may take to report theirs
STACKS_S = 10.0  # how long they may take to write their stacks
# Imported once, in the process from which the ranks are forked.
PRELOAD = [
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "amp_mp",
    "pytest",
]
PROCESSES = 4
_pools: list[Pool] = []  # one at most


def on_ranks(
    world: int, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S, **kwargs: Any
) -> list[Any]:
    """Calls function(*args, **kwargs) in `world` processes, at most 4; returns results in order.

    function: of the top level of a module; the ranks import the file that defines it. Arguments and
    results are pickled; plain tensors may be among them, DTensors may not. Every call starts with
    the same random seed, and with hooks, casts, default dtype and folder as they were at first.

    Raises the exception of the rank that failed first, with a note that has the rank and its
    traceback; TimeoutError, with what each rank was doing, for ranks that do not answer in limit_s.
    The processes are replaced after either, because the ranks that did not fail may be waiting in a
    collective for ever.
    """
    if not _pools:
        _pools.append(Pool())
    try:
        return _pools[0].call(world, function, args, kwargs, limit_s)
    except BaseException:
        _pools.pop().kill()
        raise


class Pool:
    """Four processes, of which the first 1, 2 or 4 are the ranks of a process group."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        os.environ["OMP_NUM_THREADS"] = "1"
        self.folder = tempfile.TemporaryDirectory(prefix="ranks")
        self.processes, self.pipes = [], []
        # Measured once for all ranks, which may differ where each measures while tests run.
        choices = dict(_C.products.chosen)
        for rank in range(PROCESSES):
            ours, theirs = context.Pipe()
            arguments = (rank, self.folder.name, theirs, choices)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def call(self, world: int, function: Any, args: Any, kwargs: Any, limit_s: float) -> list[Any]:
        """See on_ranks."""
        file = sys.modules[function.__module__].__file__
        request = packed((world, file, function.__qualname__, args, kwargs))
        pipes = self.pipes[:world]
        for pipe in pipes:
            pipe.send_bytes(request)
        answers: dict[int, Any] = {}
        until = time.monotonic() + limit_s
        failed: list[tuple[int, BaseException, str]] = []
        while len(answers) < world:
            missing = {pipe: r for r, pipe in enumerate(pipes) if r not in answers}
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
        return [answers[rank] for rank in range(world)]

    def receive(self, rank: int, pipe: Connection) -> tuple[Any, tuple[BaseException, str] | None]:
        """A rank's result and None, or None and what went wrong there."""
        try:
            return unpacked(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.processes[rank].join()
            code = self.processes[rank].exitcode
            return None, (RuntimeError(f"the process of rank {rank} ended with {code}"), "")

    def describe_hang(self, function: Any, limit_s: float, missing: list[int]) -> str:
        """Which ranks have not answered, and their stacks."""
        for rank in missing:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        files = {rank: Path(self.folder.name, f"stack{rank}") for rank in missing}
        until = time.monotonic() + STACKS_S
        while time.monotonic() < until and not all(
            f"in {serve.__name__}\n" in file.read_text() for file in files.values()
        ):
            time.sleep(0.01)
        stacks = [f"rank {rank}:\n{file.read_text()}" for rank, file in files.items()]
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
    """Ends the processes."""
    while _pools:
        _pools.pop().kill()


def serve(rank: int, folder: str, pipe: Connection, choices: dict[torch.dtype, Any]) -> None:
    """What each process does: answers calls until the pipe is closed."""
    torch.set_num_threads(1)
    warnings.filterwarnings("error", "amp_mp")  # as pyproject.toml has them for the tests' process
    warnings.filterwarnings("ignore", 'amp_mp: squares stored as "log8"')
    warnings.filterwarnings("ignore", r"amp_mp: \w+ has skipped step \d+: gradients are inf")
    gc.freeze()  # what the ranks share is not looked through after every call
    for low, choice in choices.items():
        _C.products.choose(low, *choice)
    worlds, at_first = Worlds(rank, folder), global_state()
    with open(Path(folder, f"stack{rank}"), "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        while True:
            try:
                request = pipe.recv_bytes()
            except EOFError:
                os._exit(0)  # where a process ends tidily, gloo waits for ever once in twenty runs
            pipe.send_bytes(answer(request, worlds))
            restore(at_first)
            gc.collect()  # models and their hooks
            gc.freeze()  # what is left stays; looking through it again took a fifth of the time


class Worlds:
    """The default process groups of 1, 2 and 4 ranks, each made when it is first asked for.

    They stay: torch and this library keep meshes, and what they know of them, by their ranks. The
    groups that a call makes stay with its world's; their numbers are part of their names.
    """

    def __init__(self, rank: int, folder: str) -> None:
        self.rank, self.folder = rank, folder
        self.made: dict[int, Any] = {}
        self.counts: dict[int, int] = {}

    def enter(self, world: int) -> None:
        """Make the group of `world` ranks torch's default one."""
        if dist.is_initialized():
            self.counts[dist.get_world_size()] = c10d._world.group_count
        if world not in self.made:
            c10d._update_default_pg(None)
            c10d._world.group_count = world * 1_000_000  # ranks 0 and 1 make more than 2 and 3
            init = f"file://{self.folder}/rendezvous{world}"
            dist.init_process_group("gloo", init_method=init, rank=self.rank, world_size=world)
            self.made[world] = c10d._get_default_group()
        else:
            c10d._update_default_pg(self.made[world])
            c10d._world.group_count = self.counts[world]


def answer(request: bytes, worlds: Worlds) -> bytes:
    """The packed result and None, or None and the exception with its traceback."""
    try:
        world, file, name, args, kwargs = unpacked(request)
        worlds.enter(world)
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
