"""A small GPT in float32 weights under autocast: step time and peak memory against torch.autocast.

python benchmarks/casting_gpt.py
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import amp_mp as amp
from amp_mp.casting.op_table import install
from amp_mp.casting.step_hooks import install_step_hooks

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from gpt import GPT

LOW = torch.bfloat16
LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 4, 256, 2, 64, 32  # as examples/gpt_settings.py
ARMS = {  # the table, the optimizer, and whether casts are kept
    "torch.autocast": ("", torch.optim.AdamW, False),
    '"torch" table': ("torch", torch.optim.AdamW, False),
    '"apex" table': ("apex", torch.optim.AdamW, False),
    '"torch" table, amp_mp\'s AdamW': ("torch", amp.optim.AdamW, False),
    '"torch" table, amp_mp\'s AdamW, keep_casts': ("torch", amp.optim.AdamW, True),
}


def trainer(arm: str) -> Callable[[], None]:
    """A training step of a new model under the arm's table, which is put in force."""
    _, optimizer_type, keep_casts = ARMS[arm]
    torch.manual_seed(0)
    model = GPT(LAYERS, WIDTH, HEADS, CONTEXT)
    fused = {"fused": True} if optimizer_type is torch.optim.AdamW else {}
    optimizer = optimizer_type(model.parameters(), lr=1e-3, **fused)
    tokens = torch.randint(0, 256, (BATCH, CONTEXT + 1))

    def step() -> None:
        optimizer.zero_grad()
        with (
            amp.autocast("cpu", LOW, keep_casts=True) if keep_casts else torch.autocast("cpu", LOW)
        ):
            logits = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()

    return step


def enter(arm: str) -> None:
    table = ARMS[arm][0]
    if table:
        install_step_hooks()
        install(table, "cpu")
    else:
        amp.casting.uninstall()


def times(rounds: int) -> dict[str, float]:
    """Seconds a step, medians; the arms take turns."""
    steps = {arm: trainer(arm) for arm in ARMS}
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for number in track(range(rounds + 2), "steps", console=Console(stderr=True)):
        for arm, step in steps.items():
            enter(arm)
            step()  # changing the table has emptied caches
            start = time.perf_counter()
            step()
            step()
            if number >= 2:
                found[arm].append((time.perf_counter() - start) / 2)
    return {arm: statistics.median(values) for arm, values in found.items()}


def peak(arm: str) -> int:
    """Largest resident memory in bytes of a process that trains the arm alone."""
    command = [sys.executable, __file__, "--alone", arm]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory is given back
    return int(subprocess.check_output(command, env=environment, text=True))


def alone(arm: str) -> None:
    torch.set_num_threads(1)
    enter(arm)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = trainer(arm)
    for _ in range(4):
        step()
    print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    peaks = {arm: statistics.median(peak(arm) for _ in range(3)) for arm in ARMS}
    seconds = times(rounds)
    table = Table(
        title=f"GPT, {LAYERS} x {WIDTH}, {BATCH} x {CONTEXT} tokens, one thread",
        title_justify="left",
    )
    for column in ("", "ms a step", "against torch.autocast", "peak MB", "against torch.autocast"):
        table.add_column(column, justify="left" if not column else "right")
    base = "torch.autocast"
    for arm in ARMS:
        table.add_row(
            arm,
            f"{1e3 * seconds[arm]:.1f}",
            f"{seconds[arm] / seconds[base] - 1:+.1%}",
            f"{peaks[arm] / 1e6:.1f}",
            f"{peaks[arm] / peaks[base] - 1:+.1%}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alone", choices=list(ARMS), help="print one arm's peak memory and end")
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    alone(arguments.alone) if arguments.alone else main(arguments.rounds)
