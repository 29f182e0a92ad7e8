"""Small matrix products on a CPU: float32, torch.autocast, and amp_mp's choice by size.

    python benchmarks/products.py               a sweep: time against float32
    python benchmarks/products.py --calibrate   prints the table in csrc/torch/products/sizes.cpp

A product is linear(x, weight), forward, with x [M, K] in float32 and a weight [N, K] that requires
a gradient and is cast once.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn.functional import linear

from amp_mp import _C

LOW = torch.bfloat16
Shape = tuple[int, int, int]
# As in sizes.cpp: rows M, columns N. Sizes that are no multiple of 4 cost float32 more.
ROWS = tuple(2**i for i in range(12))
EVEN = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
RAGGED = (3, 6, 11, 23, 45, 91)
DEPTHS = tuple(sorted({2**i for i in range(12)} | {3 * 2**i for i in range(10)}))
NEVER = 99999
WORK = 32768, 2**25  # multiplications below and above which the answer is clear


def seconds(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


@dataclass(frozen=True)
class Arm:
    """One way to compute a product: what is called, and how the operator is cast meanwhile."""

    call: Callable[[], object]
    policy: str | None = None  # None: casts off

    def enter(self) -> None:
        torch.set_autocast_enabled("cpu", self.policy is not None)
        _C.casting.set_policy("cpu", "aten::linear", self.policy or "stock")


def ratios(arms: dict[str, Arm], rounds: int = 5) -> dict[str, float]:
    """Each arm's time over the first one's: interleaved, and the median over rounds."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    calls = 3
    for number in range(-1, rounds):
        for name, arm in arms.items():
            arm.enter()
            arm.call()  # the arm before it left other weights in the processor's cache
            times[name].append(seconds(arm.call, calls))
        if number < 0:  # a first round to warm up and to learn how long a call takes
            calls = max(2, min(100, int(0.001 / max(t[0] for t in times.values()))))
            times = {name: [] for name in arms}
    torch.set_autocast_enabled("cpu", False)
    middle = [statistics.median(values) for values in times.values()]
    return {name: value / middle[0] for name, value in zip(arms, middle, strict=True)}


def bfloat16_against_float32(shape: Shape) -> float:
    m, n, k = shape
    x, weight = torch.randn(m, k), torch.randn(n, k)
    low = weight.to(LOW)
    arms = {
        "float32": Arm(lambda: linear(x, weight)),
        "bfloat16": Arm(lambda: linear(x.to(LOW), low)),
    }
    return ratios(arms)["bfloat16"]


def threshold(m: int, n: int) -> int:
    """The K from which on bfloat16 pays: the one that loses least over all K."""
    logs = {}
    for k in DEPTHS:
        work = m * n * k
        if work < WORK[0]:
            logs[k] = math.log(2)
        else:
            clear = work > WORK[1] and m > 1
            logs[k] = math.log(0.5 if clear else bfloat16_against_float32((m, n, k)))

    def loss(start: int) -> float:
        wrong = [max(0.0, log if k >= start else -log) for k, log in logs.items()]
        return sum(w + 3 * (w > math.log(1.1)) for w in wrong)

    return min((*DEPTHS, NEVER), key=loss)


def calibrate() -> None:
    for name, columns in (("even", EVEN), ("ragged", RAGGED)):
        print(f"// {name}: rows M = 1, 2, 4, ...; columns N = {', '.join(map(str, columns))}")
        for m in track(ROWS, name, console=Console(stderr=True)):
            cells = [threshold(m, n) for n in columns]
            print("    {" + ", ".join("never" if c == NEVER else str(c) for c in cells) + "},")


def shapes(odd: int) -> list[Shape]:
    """The grid of powers of two up to 2048, and as many other sizes as asked for."""
    grid = [(m, n, k) for m in ROWS for n in ROWS for k in ROWS if m * n * k <= 2**28]
    generator = random.Random(0)
    size = functools.partial(generator.uniform, 0, 11)
    return grid + [(round(2 ** size()), round(2 ** size()), round(2 ** size())) for _ in range(odd)]


def sweep(odd: int) -> None:
    """Every shape three ways: float32, torch.autocast, and by size; then who is how far off."""
    found: dict[str, list[tuple[float, Shape]]] = {"torch.autocast": [], "amp_mp": []}
    missed: list[tuple[float, Shape]] = []
    for m, n, k in track(shapes(odd), "products", console=Console(stderr=True)):
        x, weight = torch.randn(m, k), torch.nn.Parameter(torch.randn(n, k))
        call = functools.partial(linear, x, weight)
        base = {"float32": Arm(call)}
        # Apart, because bfloat16 weights in the processor's cache slow down who comes next.
        ours = base | {"amp_mp": Arm(call, "low_precision_if_large")}
        others = base | {
            "torch.autocast": Arm(call, "stock"),
            "bfloat16": Arm(call, "low_precision"),
        }
        ratio = ratios(others) | ratios(ours)
        if ratio["amp_mp"] > 1.1 or (ratio["bfloat16"] < 1 / 1.2 and ratio["amp_mp"] > 0.9):
            ratio = ratios(others, rounds=15) | ratios(ours, rounds=15)  # look again: noise
        for name in found:
            found[name].append((ratio[name], (m, n, k)))
        if ratio["bfloat16"] < 1 / 1.2 and ratio["amp_mp"] > 0.9:
            missed.append((ratio["bfloat16"], (m, n, k)))
    table = Table(title="time against float32, one thread", title_justify="left")
    for column in ("", "shapes", "worst", "at M x N x K", "slower by 10 %", "geometric mean"):
        table.add_column(column, justify="left" if not column else "right")
    for name, rows in found.items():
        worst, at = max(rows)
        table.add_row(
            name,
            str(len(rows)),
            f"{worst:.2f}",
            " x ".join(map(str, at)),
            str(sum(ratio > 1.1 for ratio, _ in rows)),
            f"{statistics.geometric_mean(ratio for ratio, _ in rows):.2f}",
        )
    console = Console(width=110)
    console.print(table)
    slow = sorted((row for row in found["amp_mp"] if row[0] > 1.1), reverse=True)
    for title, rows in (("slower than float32 by 10 %", slow), ("bfloat16 missed", sorted(missed))):
        listed = ", ".join(f"{'x'.join(map(str, s))} ({r:.2f})" for r, s in rows)
        console.print(f"{title}: {len(rows)}. {listed}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--odd", type=int, default=500)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_autocast_dtype("cpu", LOW)
    calibrate() if arguments.calibrate else sweep(arguments.odd)
