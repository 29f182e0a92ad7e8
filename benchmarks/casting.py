"""What casting costs beside the casts: nanoseconds per operator, and two tiny nets.

OMP_NUM_THREADS=1 python benchmarks/casting.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import amp_mp as amp
from amp_mp.casting.op_table import install

LOW = torch.bfloat16
CALLS, ROUNDS = 400, 30


def mean_ns(call: Callable[[], Any], calls: int) -> float:
    """Nanoseconds of a call: the mean of `calls` in a row, after a first."""
    call()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return 1e9 * (time.perf_counter() - start) / calls


def compare(call: Callable[[], Any], calls: int, every_call: bool) -> dict[str, float]:
    """Medians of plain, torch.autocast, and both tables under torch.autocast, taking turns.

    A network enters its region at every call, as in training; an operator is timed inside one.
    """
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name in ("plain", "torch.autocast", '"torch" table', '"apex" table'):
            install(name.split('"')[1] if '"' in name else "stock", "cpu")
            if '"' not in name:
                amp.casting.uninstall()

            def region(name: str = name) -> AbstractContextManager[Any]:
                return nullcontext() if name == "plain" else torch.autocast("cpu", LOW)

            def inside(region: Callable[[], AbstractContextManager[Any]] = region) -> None:
                with region():
                    call()

            with nullcontext() if every_call else region():
                times.setdefault(name, []).append(mean_ns(inside if every_call else call, calls))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    a, b = torch.randn(8, 8).to(LOW), torch.randn(8, 8).to(LOW)
    mlp = nn.Sequential(
        nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    )
    cell, x = nn.LSTMCell(16, 16), torch.randn(4, 16)

    def lstm() -> None:
        state = None
        for _ in range(20):
            state = cell(x, state)

    def train_mlp() -> None:
        mlp(x).float().sum().backward()

    with torch.no_grad():
        rows = {
            "mm, listed": compare(lambda: torch.mm(a, b), CALLS, False),
            "add, unlisted": compare(lambda: torch.add(a, b), CALLS, False),
            "LSTMCell x 20, forward": compare(lstm, 5, True),
        }
    rows["MLP, forward and backward"] = compare(train_mlp, 40, True)
    table = Table(title="ns a call", title_justify="left")
    table.add_column("")
    for name in rows["mm, listed"]:
        table.add_column(name, justify="right")
    for label, times in rows.items():
        table.add_row(label, *(f"{value:,.0f}" for value in times.values()))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
