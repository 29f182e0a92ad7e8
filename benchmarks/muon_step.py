"""A whole Muon step on a transformer's matrices in bfloat16: torch's pipeline against amp_mp's.

Both keep bfloat16 weights, float32 masters and momentum, clip by the global norm and carry a loss
scale. torch: cast the gradients to float32, GradScaler.unscale_, clip_grad_norm_, torch.optim.Muon
on the masters, cast the weights back. amp_mp: four passes and the products. The products alone and
the machine's own matrix product say what bounds both. benchmarks/step.py prints the table, too.

    OMP_NUM_THREADS=1 python benchmarks/muon_step.py
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from timing import Candidate, quartiles, samples
from torch_pipeline import SCALE, pipeline, scaled

import amp_mp as amp
from amp_mp._C import orthogonalise_

ITERATIONS = 5
MEMORIES = ("float32", "exact", "lean", "tiny")


def shapes_of(layers: int, width: int) -> list[tuple[int, int]]:
    """The matrices of a transformer's blocks: query, key, value, output, and the MLP's two."""
    return [*[(width, width)] * 4, (4 * width, width), (width, 4 * width)] * layers


def matrices(shapes: list[tuple[int, int]], device: str) -> list[torch.nn.Parameter]:
    """Parameters with gradients of the same dtype that carry the loss scale."""
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape in shapes:
        values = 0.02 * torch.randn(shape, generator=generator)
        param = torch.nn.Parameter(values.to(device, torch.bfloat16))
        grad = 1e-3 * SCALE * torch.randn(shape, generator=generator)
        param.grad = grad.to(device, torch.bfloat16)
        params.append(param)
    return params


def torch_pipeline(shapes: list[tuple[int, int]], device: str) -> Callable[[], None]:
    """What mixed precision with low-precision weights takes with torch alone."""
    model = matrices(shapes, device)
    masters = [torch.nn.Parameter(p.detach().float()) for p in model]
    optimizer = torch.optim.Muon(masters, lr=1e-4)
    return pipeline(model, masters, optimizer, device)


def our_step(shapes: list[tuple[int, int]], device: str, memory: str) -> Callable[[], None]:
    """The same by amp_mp."""
    optimizer = amp.optim.Muon(matrices(shapes, device), 1e-4, max_grad_norm=1.0, memory=memory)
    return scaled(optimizer, device)


def products(shapes: list[tuple[int, int]], device: str) -> tuple[Callable[[], None], float]:
    """The Newton-Schulz iterations of a step alone, and how many operations their products are."""
    stacks = []
    operations = 0.0
    for shape in sorted(set(shapes)):
        count = shapes.count(shape)
        stacks.append(torch.randn(count, *shape, device=device).bfloat16())
        r, c = sorted(shape)
        operations += count * ITERATIONS * (4 * r * r * c + 2 * r**3)

    def run() -> None:
        for stack in stacks:
            orthogonalise_(stack, {})

    return run, operations


def compare(layers: int, width: int, rounds: int, device: str) -> None:
    """Times all candidates in turn and prints the table."""
    shapes = shapes_of(layers, width)
    alone, operations = products(shapes, device)
    side = 4 * width
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    runs = {
        "torch.optim.Muon, with its pipeline": torch_pipeline(shapes, device),
        **{f"amp_mp, {memory}": our_step(shapes, device, memory) for memory in MEMORIES},
        "  the products alone": alone,
        "  one product": functools.partial(torch.mm, a, b),
    }
    # Products are long; with processor time, other programs on the machine count little.
    alone_on_cpu = device == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone_on_cpu else time.perf_counter
    candidates = [Candidate(name, run, 0) for name, run in runs.items()]
    times = samples(candidates, rounds, device, clock=clock)
    seconds = {name: statistics.median(each) for name, each in times.items()}
    base = times[next(iter(runs))]
    of_products, of_one = seconds["  the products alone"], seconds["  one product"]
    rates = {
        "  the products alone": operations / of_products,
        "  one product": 2 * side**3 / of_one,
    }
    title = f"{layers} blocks of width {width}: {len(shapes)} matrices, bfloat16"
    table = Table(title=title, title_justify="left")
    speed = "speed against torch (quartiles)"
    for column in ("", "ms", speed, "products' share", "GFLOP/s"):
        table.add_column(column, justify="left" if not column else "right")
    for name, own in seconds.items():
        is_step = name not in rates
        turns = [torchs / ours for torchs, ours in zip(base, times[name], strict=True)]
        table.add_row(
            name,
            f"{1e3 * own:.1f}",
            quartiles(turns) if is_step else "",
            f"{of_products / own:.0%}" if is_step else "",
            f"{rates[name] / 1e9:.0f}" if name in rates else "",
        )
    Console(width=110).print(table)
    reached = rates["  the products alone"] / rates["  one product"]
    print(f"the products reach {reached:.0%} of one product of {side} x {side}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where (cpu)")
    parser.add_argument("--threads", type=int, default=1, help="threads for all candidates (1)")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks (4)")
    parser.add_argument("--width", type=int, default=512, help="of a block (512)")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds (9)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} thread(s), amp_mp {amp.build_info()}")
    compare(arguments.layers, arguments.width, arguments.rounds, arguments.device)


if __name__ == "__main__":
    main()
