"""What dynamic loss scaling costs over static: whole training steps, pairwise.

OMP_NUM_THREADS=1 python benchmarks/scaling.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import Candidate, medians

import amp_mp as amp

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from gpt import GPT
from rich.console import Console
from rich.table import Table

LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 4, 256, 2, 64, 32  # as examples/gpt_settings.py
LOW = torch.bfloat16  # float16's own slowness on a CPU would hide the difference
SCALES: dict[str, Any] = {"static": 128.0, "Backoff": "Backoff", "LogMax": "LogMax"}


def trainer(kind: str, scale: Any) -> Callable[[], None]:
    """A training step of a new model, its loss scaled as `scale` says."""
    torch.manual_seed(0)
    model = GPT(LAYERS, WIDTH, HEADS, CONTEXT)
    tokens = torch.randint(0, 256, (BATCH, CONTEXT + 1))
    amp.prepare(model, LOW)
    if kind == "FP16_Optimizer(torch AdamW)":
        inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        optimizer: Any = amp.FP16_Optimizer(inner, loss_scale=scale, verbose=False)
    else:
        optimizer = amp.optim.AdamW(model.parameters(), lr=1e-4)
        scaler = amp.GradScaler("cpu", loss_scale=scale)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        if kind == "FP16_Optimizer(torch AdamW)":
            optimizer.backward(loss)
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return step


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    table = Table(title="A training step of the small GPT, one thread", title_justify="left")
    for column in ("", *SCALES):
        table.add_column(column, justify="left" if not column else "right")
    for kind in ("FP16_Optimizer(torch AdamW)", "GradScaler, amp_mp AdamW"):
        steps = [Candidate(name, trainer(kind, scale), 0) for name, scale in SCALES.items()]
        seconds = medians(steps, rounds)
        cells = [
            f"{1e3 * value:.1f} ms ({value / seconds['static'] - 1:+.1%})"
            for value in seconds.values()
        ]
        table.add_row(kind, *cells)
    Console(width=110).print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    main(parser.parse_args().rounds)
