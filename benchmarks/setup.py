"""What comes before an ordinary step: the first step, loading, a parameter that wakes.

amp_mp's AdamW (memory="exact") beside torch.optim.AdamW(fused=True), in CPU time of this process,
in turns.

OMP_NUM_THREADS=1 python benchmarks/setup.py
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import amp_mp as amp

SHAPE = (8, 32)  # groups of 32 fit into its rows
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
# Prepares one call and returns it; preparing is not timed.
Case = Callable[[Make, list[nn.Parameter]], Callable[[], object]]


def ours(params: list[nn.Parameter], memory: str = "exact") -> torch.optim.Optimizer:
    return amp.optim.AdamW(params, lr=1e-3, memory=memory, check_overflow=False)  # as torch's


def torchs(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def tiny(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return ours(params, "tiny")


def model(tensors: int) -> list[nn.Parameter]:
    """bfloat16 parameters with gradients."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(SHAPE).bfloat16()) for _ in range(tensors)]
    for param in params:
        param.grad = torch.randn(SHAPE).bfloat16()
    return params


def stepped(make: Make, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer that has taken three steps."""
    optimizer = make(params)
    for _ in range(3):
        optimizer.step()
    return optimizer


def ordinary_step(make: Make, params: list[nn.Parameter]) -> Callable[[], object]:
    return stepped(make, params).step


def first_step(make: Make, params: list[nn.Parameter]) -> Callable[[], object]:
    return make(params).step


def step_after_loading(make: Make, params: list[nn.Parameter]) -> Callable[[], object]:
    optimizer = stepped(make, params)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return optimizer.step


def waking(make: Make, params: list[nn.Parameter]) -> Callable[[], object]:
    """One parameter gets its first gradient."""
    grad: Tensor | None
    grad, params[0].grad = params[0].grad, None
    optimizer = stepped(make, params)
    params[0].grad = grad
    return optimizer.step


def loading(make: Make, params: list[nn.Parameter]) -> Callable[[], object]:
    optimizer = stepped(make, params)
    saved = copy.deepcopy(optimizer.state_dict())
    return lambda: optimizer.load_state_dict(saved)


def loading_exact_to_tiny(make: Make, params: list[nn.Parameter]) -> Callable[[], object]:
    """torch has one format: its row is a load as above."""
    if make is torchs:
        return loading(make, params)
    saved = copy.deepcopy(stepped(make, params).state_dict())
    optimizer = stepped(tiny, params)
    return lambda: optimizer.load_state_dict(saved)


CASES: dict[str, Case] = {
    "ordinary step": ordinary_step,
    "first step": first_step,
    "step after load_state_dict": step_after_loading,
    "step in which one parameter wakes": waking,
    "load_state_dict, same format": loading,
    "load_state_dict, exact to tiny": loading_exact_to_tiny,
}


def measure(tensors: int, turns: int) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of CPU time of each case: amp_mp's and torch's, one of each per turn."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in CASES}
    for turn in range(1 + turns):  # the first warms up
        for name, case in CASES.items():
            for make, times in zip((ours, torchs), found[name], strict=True):
                run = case(make, model(tensors))
                start = time.process_time()
                run()
                elapsed = time.process_time() - start
                if turn > 0:
                    times.append(elapsed)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=500)
    parser.add_argument("--turns", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(
        title=f"{given.tensors} bfloat16 tensors, ms of CPU time, medians of {given.turns}",
        title_justify="left",
    )
    for column in ("", "amp_mp", "torch fused", "ratio", "from", "to"):
        table.add_column(column, justify="left" if not column else "right")
    for name, (own, theirs) in measure(given.tensors, given.turns).items():
        ratios = [a / b for a, b in zip(own, theirs, strict=True)]
        milliseconds = [f"{1e3 * statistics.median(times):.2f}" for times in (own, theirs)]
        spread = (statistics.median(ratios), min(ratios), max(ratios))
        table.add_row(name, *milliseconds, *(f"{ratio:.2f}x" for ratio in spread))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
