"""A small sharded model and the loops of a user's script around it, for test_around_sharding*."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import layouts
import torch
import torch.distributed as dist
from layouts import made_once
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import amp_mp as amp

CLOSE = (
    1e-6  # how far float32 weights of 1 may be apart whose gradients were added in another order
)


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Uneven over two processes; the last layer leaves nothing for the second."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 6), nn.Linear(6, 1)).to(
        dtype
    )


def even() -> nn.Sequential:
    """Every rank of two has a shard of the same shape."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))


def fsdp(model: nn.Sequential, **options: Any) -> nn.Sequential:
    """The first layer as a unit, and the rest as another."""
    fully_shard(model[0], **options)
    fully_shard(model, **options)
    return model


def tensor_parallel(model: nn.Sequential) -> nn.Sequential:
    """The layers of `even`: columns, then rows. The last bias is replicated."""
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    return parallelize_module(model, made_once((dist.get_world_size(),), ("tp",)), plan)


def adamw(params: Any, **options: Any) -> amp.optim.AdamW:
    return amp.optim.AdamW(params, **{"lr": 0.1, **options})


def loss_of(model: nn.Module) -> Tensor:
    """The same on all ranks."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    for _ in range(steps):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module) -> list[Tensor]:
    """The whole weights, on all ranks; every rank has to call it."""
    return [layouts.whole(p) for p in model.parameters()]


def apart(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest difference."""
    return max(float((x.float() - y.float()).abs().max()) for x, y in zip(a, b, strict=True))


def error(function: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    """What the call raises, in words; "" where it raises nothing."""
    try:
        function(*args, **kwargs)
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return ""


def steps_of(optimizer: Any) -> list[float]:
    """How many steps each parameter has taken."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [float(optimizer.state[p]["step"]) for p in params]


def poison(model: nn.Module, rank: int, value: float = float("inf")) -> None:
    """Puts a value into the shard of the first gradient that a rank has."""
    if dist.get_rank() == rank:
        grad: Any = next(model.parameters()).grad
        grad._local_tensor.view(-1)[0] = value


def file_of(state: Any, rank: int) -> Any:
    """What torch.load reads of what torch.save has written of `state` on that rank."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    files: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(files, buffer.getvalue())
    return torch.load(io.BytesIO(files[rank]), weights_only=False)
