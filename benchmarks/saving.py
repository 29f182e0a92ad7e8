"""How long training stands still for a checkpoint that is written beside it, and while it waits.

    python benchmarks/saving.py --layers 24 --size 1024

Rounds take turns: a save that waits, then one with wait=False, during which training goes on; then
steps without a save. All write to the same disk, with fsync. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import quartiles
from torch import nn

import amp_mp as amp


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    found = call()
    return time.perf_counter() - start, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of each")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--memory", default="lean")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    model = nn.Sequential(*(nn.Linear(given.size, given.size) for _ in range(given.layers)))
    amp.prepare(model, torch.bfloat16)
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-4, memory=given.memory)
    x = torch.randn(given.batch, given.size, dtype=torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    waits, stands, quiet, beside, lasts, shares = [], [], [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "c")
        for number in range(given.rounds + 1):  # the first one warms up
            waited, _ = timed(lambda: amp.checkpoint.save(path, model, optimizer))
            begun = time.perf_counter()
            stood, pending = timed(lambda: amp.checkpoint.save(path, model, optimizer, wait=False))
            during = []
            while not pending.done():
                during.append(timed(step)[0])
            written = time.perf_counter() - begun
            without = [timed(step)[0] for _ in range(max(5, len(during)))]
            if number:
                waits.append(waited)
                stands.append(stood)
                shares.append(stood / waited)
                quiet.append(statistics.median(without))
                beside.append(statistics.mean(during) / statistics.mean(without))
                lasts.append(written)
        size = sum(file.stat().st_size for file in path.iterdir()) / 2**20
    count = sum(param.numel() for param in model.parameters()) / 1e6
    seconds = "{:.3f} ({:.3f} to {:.3f})"
    print(f"{count:.1f} million parameters, {size:.0f} MiB; medians (quartiles)\n")
    print("| | |\n|---|---|")
    print(f"| a save that waits, s | {quartiles(waits)} |")
    print(f"| until `save(wait=False)` returns, s | {quartiles(stands, seconds)} |")
    print(f"| the same, as a part of the save that waits | {quartiles(shares)} |")
    print(f"| until it is written, s | {quartiles(lasts)} |")
    print(f"| a step without a save, s | {quartiles(quiet, seconds)} |")
    print(f"| a step while it is written, against one without | {quartiles(beside)} |")


if __name__ == "__main__":
    main()
