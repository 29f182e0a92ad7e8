"""How far gradients added up over micro-batches are from float64's.

    python benchmarks/main_grads.py
    torchrun --nproc_per_node 2 benchmarks/main_grads.py  # FSDP2

A linear layer without bias, a weight of 128 x 128, 32 rows of normal numbers a micro-batch, and as
many as the output's gradient. float64 multiplies and adds up the same low-precision numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import amp_mp as amp

WIDTH, ROWS = 128, 32


def micro_batches(count: int, dtype: torch.dtype, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs of the layer, and gradients of its outputs."""
    source = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x, y = torch.randn(2, ROWS, WIDTH, generator=source).to(dtype)
        yield x, y


def exact(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """The weight's gradient in float64."""
    batches = micro_batches(count, dtype, seed)
    return sum((y.double().T @ x.double() for x, y in batches), torch.zeros(()).double())


def backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model(x).backward(y)


def error(found: Tensor, wanted: Tensor) -> str:
    return f"{float((found.double() - wanted).norm() / wanted.norm()):.1e}"


def on_one_process() -> Table:
    table = Table("dtype", "micro-batches", "its own", "grad_dtype alone", "attached")
    for dtype in (torch.bfloat16, torch.float16):
        for count in (8, 256):
            row = []
            for way in ("its own", "grad_dtype", "attached"):
                model = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
                if way == "grad_dtype":
                    model.weight.grad_dtype = torch.float32
                elif way == "attached":
                    amp.attach_main_grads(model)
                for x, y in micro_batches(count, dtype, seed=0):
                    backward(model, x, y)
                assert model.weight.grad is not None
                row.append(error(model.weight.grad, exact(count, dtype, seed=0)))
            table.add_row(str(dtype), str(count), *row)
    return table


def sharded_gradient(count: int, way: str) -> Tensor:
    """The mean over the processes of what their micro-batches add up to."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    unit = fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    amp.prepare(model, torch.bfloat16)
    if way == "attached":
        amp.attach_main_grads(model)
    for index, (x, y) in enumerate(micro_batches(count, torch.bfloat16, seed=dist.get_rank())):
        unit.set_requires_gradient_sync(way != "at the end" or index == count - 1)
        backward(model, x, y)
    gradient = model[0].weight.grad
    assert gradient is not None
    return gradient.full_tensor()  # type: ignore[attr-defined, no-any-return]


def with_fsdp2() -> Table:
    ways = ["each time", "at the end", *(["attached"] if torch.__version__ >= (2, 15) else [])]
    table = Table("micro-batches of each", *ways)
    for count in (1, 64):
        each = [exact(count, torch.bfloat16, seed) for seed in range(dist.get_world_size())]
        wanted = torch.stack(each).mean(0)
        table.add_row(str(count), *(error(sharded_gradient(count, way), wanted) for way in ways))
    return table


def main() -> None:
    torch.manual_seed(0)
    if not dist.is_torchelastic_launched():
        Console().print(on_one_process())
        return
    dist.init_process_group("gloo")
    table = with_fsdp2()
    if dist.get_rank() == 0:
        Console().print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
