"""How far the norm of a gradient depends on the number of shards it is cut into.

Each shard is summed apart, in the order of csrc/core/reduce.h, and the sums are added in double, as
amp_mp's optimizers do over processes. The shards are as even as fully_shard makes them of rows of
one element, so most blocks of 4,096 begin elsewhere than in the whole gradient.

    OMP_NUM_THREADS=1 python benchmarks/norm_cuts.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from amp_mp import _C

CUTS = (1, 2, 4, 8, 64)
Draw = Callable[[int, torch.Generator], Tensor]


def normal(count: int, source: torch.Generator) -> Tensor:
    return torch.randn(count, generator=source)


KINDS: dict[str, Draw] = {
    "normal, float32": normal,
    "normal, bfloat16": lambda n, source: normal(n, source).bfloat16(),
    "log-normal, sigma 3": lambda n, source: normal(n, source).mul_(3).exp_(),
    "0.1 everywhere": lambda n, source: torch.full((n,), 0.1),
    "normal, and one 10^4 times larger": lambda n, source: (
        normal(n, source).mul_(1e-4).index_fill_(0, torch.tensor([n // 3]), 1.0)
    ),
}


def norm(grad: Tensor, cuts: int) -> float:
    """The norm of a gradient that lies on so many processes."""
    squares = [float(_C.measure([shard.clone()])[-1, 0]) for shard in grad.chunk(cuts)]
    return float(sum(squares) ** 0.5)


def exact(grad: Tensor) -> float:
    """The norm in double."""
    total = sum(float(part.double().square().sum()) for part in grad.split(1 << 24))
    return float(total**0.5)


def errors(draw: Draw, count: int, trials: int) -> tuple[float, float]:
    """The largest relative distance from one shard's norm, and of any of them from the exact one.

    Over all numbers of cuts, and `trials` gradients of `count` elements.
    """
    apart = off = 0.0
    for seed in range(trials):
        grad = draw(count, torch.Generator().manual_seed(seed))
        wanted, found = exact(grad), [norm(grad, cuts) for cuts in CUTS]
        apart = max(apart, *(abs(each / found[0] - 1) for each in found))
        off = max(off, *(abs(each / wanted - 1) for each in found))
    return apart, off


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--largest", type=int, default=10**8, help="elements of the last column")
    parser.add_argument("--elements", type=int, default=10**7, help="of all trials of a size")
    parser.add_argument("--most", type=int, default=1000, help="trials of a size")
    arguments = parser.parse_args()
    sizes = [10**k for k in range(3, 9) if 10**k <= arguments.largest]
    table = Table(
        title=f"Norms of {CUTS} shards: largest relative distance apart (from the exact norm)",
        title_justify="left",
    )
    for column in ("gradients", *(f"{size:,}" for size in sizes)):
        table.add_column(column, justify="left" if column == "gradients" else "right")
    for name, draw in track(KINDS.items(), description="measuring", transient=True):
        cells = []
        for size in sizes:
            trials = max(1, min(arguments.most, arguments.elements // size))
            apart, off = errors(draw, size, trials)
            cells.append(f"{apart:.1e} ({off:.1e})")
        table.add_row(name, *cells)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
