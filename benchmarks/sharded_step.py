"""What DTensor parameters cost a step beside plain ones, and what the one collective costs.

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
from timing import Candidate, medians
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
    return amp.optim.AdamW(params, **options).step


def theirs(mesh: Any, count: int, size: int) -> Callable[[], None]:
    return torch.optim.AdamW(params_of(count, size, mesh, torch.float32), fused=True).step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--turns", type=int, default=41)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        sizes = (arguments.count, arguments.size)
        steps = {
            "amp_mp, plain": ours(None, *sizes),
            "amp_mp, DTensor": ours(mesh, *sizes),
            "amp_mp with max_grad_norm, plain": ours(None, *sizes, max_grad_norm=1.0),
            "amp_mp with max_grad_norm, DTensor": ours(mesh, *sizes, max_grad_norm=1.0),
            "torch fused AdamW, plain": theirs(None, *sizes),
            "torch fused AdamW, DTensor": theirs(mesh, *sizes),
        }
        elements = 28 * arguments.count * arguments.size
        found = medians(
            [Candidate(name, step, elements) for name, step in steps.items()], arguments.turns
        )
    print(f"{arguments.count} parameters of {arguments.size} elements, microseconds a parameter")
    for name, seconds in found.items():
        print(f"{name:36} {1e6 * seconds / arguments.count:8.2f}")


if __name__ == "__main__":
    main()
