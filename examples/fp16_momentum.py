"""SGD with momentum in float16: where a buffer without the learning rate in it helps.

Minimises 4,096 independent quadratics, each with the loss 0.004 (w - target)^2, with gradients
stored in float16 at a loss scale of 1,024. There are five ways to do SGD with momentum:

    float32         weights and buffer in float32
    classic, ops    H = m H - lr g, w = w + H, every operation rounded to float16
    classic         the same, computed in float32 and stored in float16
    reformulated    H = m H - g, w = w + lr H, computed in float32 and stored in float16
    master          as float32, on a float32 master of float16 weights

The program prints the remaining share of the initial loss. docs/benchmarks.md explains the
result.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from progress import Bar
from rich.console import Console
from rich.table import Table

import amp_mp as amp

COUNT, CURVATURE, SCALE = 4096, 0.008, 1024.0


@dataclass(frozen=True)
class Case:
    """One problem: the size of its weights, the optimizer's numbers, and the steps to report."""

    name: str
    log2_weight: int
    momentum: float
    lr: float
    steps: tuple[int, ...]
    curvature: float = CURVATURE


CASES = (
    Case("A", -12, 0.99, 0.01, (200, 500, 2000)),
    Case("A'", -14, 0.9, 0.01, (500, 20000)),
    Case("B", -5, 0.9, 0.01, (20000,)),
    Case("C", -5, 0.9, 0.05, (100,), curvature=1.0),
    Case("D", -5, 0.9, 1e-4, (30000,)),
)


class Arm:
    """One way to train, by amp_mp's SGD; `step` takes a scaled float16 gradient."""

    def __init__(self, start: torch.Tensor, case: Case, **storage: str) -> None:
        self.weight = torch.nn.Parameter(start)
        optimizer = amp.optim.SGD([self.weight], case.lr, case.momentum, **storage)
        self.optimizer = amp.compat.shift_for_scale(optimizer, SCALE)

    def step(self, grad: torch.Tensor) -> None:
        self.weight.grad_dtype = grad.dtype  # lets a float32 weight have a float16 gradient
        self.weight.grad = grad
        self.optimizer.step()


class HalfOperations:
    """The classic form with every operation in float16."""

    def __init__(self, start: torch.Tensor, case: Case) -> None:
        self.weight, self.buffer, self.case = start.clone(), torch.zeros_like(start), case

    def step(self, grad: torch.Tensor) -> None:
        self.buffer = self.case.momentum * self.buffer - self.case.lr / SCALE * grad
        self.weight = self.weight + self.buffer


HALF = {"master": "none", "momentum_buffer": "float16"}
ARMS: dict[str, Callable[[torch.Tensor, Case], Arm | HalfOperations]] = {
    "float32": lambda start, case: Arm(start.float(), case),
    "classic, ops": HalfOperations,
    "classic": lambda start, case: Arm(start, case, momentum_form="scaled", **HALF),
    "reformulated": lambda start, case: Arm(start, case, **HALF),
    "master": lambda start, case: Arm(start, case),
}


@torch.no_grad()
def remaining(case: Case, arm: str, seed: int = 0) -> list[float]:
    """The remaining share of the initial loss after each step."""
    generator = torch.Generator().manual_seed(seed)
    size = 2.0**case.log2_weight
    start, target = size * torch.randn(2, COUNT, generator=generator)
    start = start.half()
    trained = ARMS[arm](start.clone(), case)
    first = (start.double() - target).square().sum()
    shares = []
    for _ in range(max(case.steps)):
        difference = trained.weight.detach().float() - target
        trained.step((SCALE * case.curvature * difference).half())
        shares.append(float((trained.weight.detach().double() - target).square().sum() / first))
    return shares


def main(longest: int) -> None:
    torch.set_num_threads(1)
    table = Table(title="Remaining share of the initial loss", title_justify="left")
    for column in ("case", "steps", *ARMS):
        table.add_column(column, justify="right")
    cases = [case for case in CASES if max(case.steps) <= longest]
    with Bar(total=len(cases) * len(ARMS), unit="run", dynamic_ncols=True) as bar:
        for case in cases:
            curves = {}
            for arm in ARMS:
                curves[arm] = remaining(case, arm)
                bar.update()
            for steps in case.steps:
                row = [f"{curves[arm][steps - 1]:.3g}" for arm in ARMS]
                table.add_row(case.name, str(steps), *row)
    Console(width=110).print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--longest", type=int, default=10**9, help="leave out cases with more steps"
    )
    main(parser.parse_args().longest)
