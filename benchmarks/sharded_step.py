"""What DTensor parameters cost a step beside plain ones.

One process in a group of its own: the tensors are the same, so the difference is the host's work
for each parameter. torch's fused AdamW beside it, on plain parameters and on DTensors.

    OMP_NUM_THREADS=1 python benchmarks/sharded_step.py
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from timing import Candidate, quartiles, samples
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import amp_mp as amp


def params_of(count: int, size: int, mesh: Any, dtype: torch.dtype) -> list[Any]:
    """Parameters with gradients; DTensors where there is a mesh."""
    found = []
    for _ in range(count):
        value, grad = torch.randn(size).to(dtype), torch.randn(size).to(dtype)
        if mesh is not None:
            value, grad = (distribute_tensor(t, mesh, [Shard(0)]) for t in (value, grad))
        param = torch.nn.Parameter(value)
        param.grad = grad
        found.append(param)
    return found


def ours(mesh: Any, count: int, size: int, **options: Any) -> Callable[[], None]:
    params = params_of(count, size, mesh, torch.bfloat16)
    return amp.optim.AdamW(params, check_overflow=False, **options).step


def theirs(mesh: Any, count: int, size: int) -> Callable[[], None]:
    return torch.optim.AdamW(params_of(count, size, mesh, torch.float32), fused=True).step


def show(title: str, found: dict[str, list[float]], count: int) -> None:
    """A row for each pair of steps: microseconds a parameter, and what DTensors add in a turn."""
    table = Table(title=title, title_justify="left")
    for column in ("", "plain", "DTensors", "DTensors - plain"):
        table.add_column(column, justify="left" if not column else "right")
    for name in dict.fromkeys(name.rsplit(", ", 1)[0] for name in found):
        plain, sharded = (
            [1e6 * seconds / count for seconds in found[f"{name}, {kind}"]]
            for kind in ("plain", "DTensors")
        )
        more = [b - a for a, b in zip(plain, sharded, strict=True)]
        table.add_row(name, *map(quartiles, (plain, sharded, more)))
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--turns", type=int, default=201)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = (arguments.count, arguments.size)
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        steps: dict[str, Callable[[], None]] = {}
        for kind, mesh in (("plain", None), ("DTensors", init_device_mesh("cpu", (1,)))):
            steps[f"amp_mp, {kind}"] = ours(mesh, *sizes)
            steps[f"amp_mp with max_grad_norm, {kind}"] = ours(mesh, *sizes, max_grad_norm=1.0)
            steps[f"torch's fused AdamW, {kind}"] = theirs(mesh, *sizes)
        found = samples([Candidate(name, step, 0) for name, step in steps.items()], arguments.turns)
        dist.destroy_process_group()
    title = f"{sizes[0]} parameters of {sizes[1]} elements: microseconds a parameter, median"
    show(f"{title} (quartiles) of {arguments.turns} steps in turns", found, arguments.count)


if __name__ == "__main__":
    main()
