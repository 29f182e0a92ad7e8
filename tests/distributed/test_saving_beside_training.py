"""checkpoint.save(wait=False) on several processes: what it writes, and errors that all raise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import caught
from forked import Script, run_each
from layouts import Bag, differences, shard, train
from ranks import LARGE, on_ranks
from small_disk import small_disk
from tiers import tiered
from torch import nn

import amp_mp as amp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]
SHAPES = [(96, 64), (33, 96), (1, 33), (33,), (3, 64), (1,)]
PLACES = [("fsdp", 1), ("fsdp", 2), ("columns", 2), ("fsdp", 4), ("hsdp", 4), ("tp fsdp", 4)]


def trained(layout: str | None, preset: str, steps: int) -> Any:
    model: Any = Bag(SHAPES, torch.bfloat16)
    model = model if layout is None else shard(model, layout)
    options = {"lr": 1e-2, "memory": preset, "max_grad_norm": 1e9, "check_overflow": True}
    optimizer = amp.optim.AdamW(model.parameters(), **options)
    train(model, optimizer, range(steps))
    return model, optimizer


def save_beside(layout: str, preset: str, path: str) -> None:
    """Each checkpoint is written while training's own collectives run."""
    model, optimizer = trained(layout, preset, 1)
    for step in range(1, 5):
        saved = amp.checkpoint.save(f"{path}{step}", model, optimizer, wait=False, step=step)
        train(model, optimizer, range(step, step + 1))
        model.zero_grad()
    saved.wait()


def load(layout: str, preset: str, path: str) -> list[str]:
    """Where a rank is not, bit for bit, what one process is after as many steps."""
    found = []
    for step in range(1, 5):
        model, optimizer = trained(layout, preset, 0)
        assert amp.checkpoint.load(f"{path}{step}", model, optimizer) == {"step": step}
        plain, plain_optimizer = trained(None, preset, step)
        parts = list(model.parameters()), optimizer, list(plain.parameters()), plain_optimizer
        found += differences(*parts)
    return found


@pytest.mark.parametrize(("layout", "ranks"), PLACES if LARGE else tiered(PLACES, PLACES[1:3]))
@pytest.mark.parametrize("preset", ["exact", "nano"])
def test_it_writes_what_was_there_at_the_call(
    layout: str, ranks: int, preset: str, tmp_path: Path
) -> None:
    on_ranks(ranks, save_beside, layout, preset, f"{tmp_path}/c")
    found = on_ranks(2, load, "fsdp", preset, f"{tmp_path}/c")
    assert found == [[], []]


@contextmanager
def full_on_rank_1() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            with small_disk(patch, 1000):
                yield
        else:
            yield


def fails(path: str, asks: str) -> list[str]:
    model, optimizer = trained("fsdp", "lean", 1)
    amp.checkpoint.save(path, model, optimizer, step=1)
    with full_on_rank_1():
        saved = amp.checkpoint.save(path, model, optimizer, step=2, wait=False)
        while not saved.done():
            pass
    messages = []
    if asks == "all" or (asks == "rank 0" and dist.get_rank() == 0):
        messages.append(caught(saved.wait))
    if asks != "all":
        messages.append(caught(amp.checkpoint.save, f"{path}2", model, optimizer))
    assert amp.checkpoint.load(path, *trained("fsdp", "lean", 0)) == {"step": 1}
    amp.checkpoint.save(path, model, optimizer, step=3, wait=False)
    assert amp.checkpoint.load(path, *trained("fsdp", "lean", 0)) == {"step": 3}
    return messages


FAILED = "c was not written: rank 1 raised OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize("asks", ["all", "nobody", "rank 0"])
def test_an_error_of_one_process_is_raised_on_all(asks: str, tmp_path: Path) -> None:
    """Also where only some have called wait(): the others' next call raises it on all."""
    found = on_ranks(2, fails, f"{tmp_path}/c", asks)
    for rank, messages in enumerate(found):
        assert len(messages) == (2 if asks == "rank 0" and rank == 0 else 1)
        for message in messages:
            assert message.startswith("RuntimeError")
            assert FAILED in message
        assert ("save before this call failed" in messages[-1]) == (asks != "all")
    assert not (tmp_path / "c2").exists()


def other_waits(path: str) -> str:
    pair = trained("fsdp", "lean", 1)
    message = caught(amp.checkpoint.save, path, *pair, wait=dist.get_rank() == 0)
    amp.checkpoint.save(path, *pair, wait=False)
    amp.checkpoint.load(path, *pair)
    return message


def test_wait_is_the_same_on_all_processes(tmp_path: Path) -> None:
    wanted = "ValueError wait must be the same on all processes; by rank it is [True, False]"
    assert on_ranks(2, other_waits, f"{tmp_path}/c") == [wanted] * 2


# A process group that ends is not torch's again, so these have processes of their own.
DESTROYS = """
import os, sys, threading
import torch, torch.distributed as dist
import amp_mp as amp

class Slow:
    def __deepcopy__(self, memo):
        return self
    def __reduce__(self):
        destroyed.wait()
        return str, ("slow",)

folder, ranks, destroyed = sys.argv[1], int(sys.argv[2]), threading.Event()
others = [os.fork() for _ in range(ranks - 1)]
rank = int(0 in others)
dist.init_process_group("gloo", init_method=f"file://{folder}/start", rank=rank, world_size=ranks)
model = torch.nn.Linear(8, 8)
amp.checkpoint.save(f"{folder}/c", model, step=1)
saved = amp.checkpoint.save(f"{folder}/c", model, step=2, slow=Slow(), wait=False)
dist.destroy_process_group()
destroyed.set()
try:
    saved.wait()
except RuntimeError as error:
    print(error, flush=True)
if rank:
    os._exit(0)
for each in others:
    os.waitpid(each, 0)
"""


def test_a_destroyed_process_group_is_named(tmp_path: Path) -> None:
    (ended,) = run_each([Script(["-c", DESTROYS, str(tmp_path), "2"])])
    wanted = f"{tmp_path}/c was not written: torch.distributed.destroy_process_group() was called"
    assert ended.stdout.count(wanted) == 2, ended
    found = amp.checkpoint.load(tmp_path / "c", nn.Linear(8, 8))
    assert found["step"] == 1


def test_one_process_needs_no_group(tmp_path: Path) -> None:
    (ended,) = run_each([Script(["-c", DESTROYS, str(tmp_path), "1"])])
    assert ended.stdout == "", ended
    found = amp.checkpoint.load(tmp_path / "c", nn.Linear(8, 8))
    assert found["step"] == 2


@pytest.mark.parametrize(
    ("ranks", "kills"),
    tiered([(1, 8), (2, 8), (1, 100), (2, 100)], [(1, 8), (2, 8)]),
)
def test_whatever_is_killed_leaves_a_whole_checkpoint(
    ranks: int, kills: int, tmp_path: Path
) -> None:
    """That of the last completed save, or of the one under way, bit for bit."""
    script = str(Path(sys.modules["forked"].__file__ or "").with_name("killed.py"))
    given = [script, str(tmp_path), str(ranks), str(kills), "1"]
    (ended,) = run_each([Script(given)])
    assert ended.returncode == 0, ended.stderr
    assert f"{kills} kills" in ended.stdout
