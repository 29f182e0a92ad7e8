"""Kills training at random moments, and checks what is left: killed.py FOLDER RANKS KILLS SEED.

Each time the ranks go on from what the last kill has left, and save beside training, until SIGKILL
ends them. Then the checkpoint has to be, bit for bit, that of the last completed save or of the one
under way. Prints how many kills met what.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoints import snapshot
from layouts import Bag, shard, train

import amp_mp as amp

SHAPES = [(512, 256), (33, 96), (33,), (96, 1024)]


def made(ranks: int) -> tuple[Any, Any]:
    model: Any = Bag(SHAPES, torch.bfloat16)
    model = shard(model, "fsdp") if ranks > 1 else model
    return model, amp.optim.AdamW(model.parameters(), lr=1e-2, memory="lean")


def latest(path: Path) -> Path:
    """The directory to load: what a script does that reads the message of load."""
    kept = path.with_name(f"{path.name}.previous")
    return kept if kept.exists() and not path.exists() else path


def trains(ranks: int, folder: Path, start: str, said: int, rank: int) -> None:
    """Saves each step beside the next one, and says which step's save is complete."""
    if ranks > 1:
        init = f"file://{folder}/{start}"
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=ranks)
    model, optimizer = made(ranks)
    path, step = folder / "c", 0
    if latest(path).exists():
        step = amp.checkpoint.load(latest(path), model, optimizer)["step"]
    while True:
        train(model, optimizer, range(step, step + 1))
        step += 1
        pending = amp.checkpoint.save(path, model, optimizer, step=step, wait=False)
        os.write(said, b"%d\n" % (step - 1))  # this save has waited for the one before
        if step % 3 == 0:
            pending.wait()
            os.write(said, b"%d\n" % step)


def in_child(action: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(1)
    return child


def main() -> None:
    torch.set_num_threads(1)  # a fork has none of the others, and would wait for them
    folder, ranks, kills, seed = Path(sys.argv[1]), *map(int, sys.argv[2:])
    drawn = random.Random(seed)
    path, met = folder / "c", Counter[str]()
    model, optimizer = made(1)  # what a run has that nobody kills, after `trained` steps
    trained = 0
    for number in range(kills):
        heard, said = os.pipe()
        start = partial(trains, ranks, folder, f"start{number}", said)
        children = [in_child(partial(start, rank)) for rank in range(ranks)]
        os.close(said)
        assert select.select([heard], [], [], 120.0)[0], "no step has ended"
        time.sleep(drawn.uniform(0, 0.3))
        drawn.shuffle(children)
        for child in children:
            os.kill(child, signal.SIGKILL)
            time.sleep(drawn.choice([0, 0, 0.01]))
        ends = [os.WTERMSIG(os.waitpid(child, 0)[1]) for child in children]
        assert signal.SIGKILL in ends, "training has failed by itself"
        lines = os.read(heard, 1 << 20).split(b"\n")[:-1]
        os.close(heard)
        completed = max(map(int, lines))
        met["with an unfinished save"] += path.with_name("c.incomplete").exists()
        met["between the renames"] += not path.exists()
        found = made(1)
        step = amp.checkpoint.load(latest(path), *found)["step"] if completed else 0
        met["the last completed" if step == completed else "the one under way"] += 1
        assert completed <= step <= completed + 1, (completed, step)
        train(model, optimizer, range(trained, step))
        trained = step
        if step:
            assert snapshot(*found) == snapshot(model, optimizer)
    print(f"{kills} kills, {trained} steps:", dict(met))


if __name__ == "__main__":
    main()
