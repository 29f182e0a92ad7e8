"""Optimizers with offload="state" beside equal ones without, and where their arrays are."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from helpers import PRETEND_GPU, raw_bytes
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import amp_mp as amp
from amp_mp import _C
from amp_mp.sharding.shards import local_of

if PRETEND_GPU:
    import amp_mp_pretend_gpu as native

DEVICE, LOW, LEAST = "cuda", torch.bfloat16, 4096  # a smaller array stays on the device
SHAPES = [(64, 96), (LEAST,), (LEAST - 1,), (40,)]


def params_of(
    shapes: Any = SHAPES, dtype: torch.dtype = LOW, device: str = DEVICE
) -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(3)
    made = [torch.randn(shape, generator=source).to(device, dtype) for shape in shapes]
    return [nn.Parameter(each) for each in made]


def fill(params: Any, step: int, overflows: bool = False) -> None:
    source = torch.Generator().manual_seed(100 + step)
    for param in params:
        local = local_of(param)
        grad = torch.randn(local.shape, generator=source).to(local.device, local.dtype)
        if overflows:
            grad.view(-1)[-1] = float("inf")
        param.grad = grad if local is param else made_like(grad, param)


def made_like(local: Tensor, param: Any) -> Tensor:
    return DTensor.from_local(local, param.device_mesh, param.placements, run_check=False)


def params_in(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def train(optimizer: Any, steps: range = range(5)) -> None:
    """Ordinary steps, one that overflows, and writes in between, through `.data` too."""
    params = params_in(optimizer)
    for step in steps:
        fill(params, step, overflows=step == 2)
        optimizer.step()
        if step == 1:
            params[0].data[1].zero_()
        with torch.no_grad():
            params[1][::3].mul_(0.5)


def held(optimizer: Any) -> Any:
    """Bytes of weights and states."""
    params = params_in(optimizer)
    return raw_bytes([[p.detach() for p in params], optimizer.state_dict()["state"]])


def arrays(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    for state in optimizer.state.values():
        yield from ((name, t) for name, t in state.items() if isinstance(t, Tensor))


def misplaced(optimizer: Any, offload: bool = True) -> list[str]:
    """The arrays that are not where they belong; all are CUDA tensors."""
    found = []
    for name, array in arrays(optimizer):
        belongs = offload and local_of(array).numel() >= LEAST
        if _C.is_on_host(local_of(array)) != belongs or array.device.type != DEVICE:
            found.append(f"{name} {tuple(array.shape)}")
    return found


def pinned() -> list[int]:
    """The bytes of each piece of memory of the host, besides those of reports, never freed."""
    gc.collect()
    return [each for each in native.host_memory()[0] if each != 1 << 16]


def adamw(params: Any = None, offload: Any = "state", **more: Any) -> Any:
    given = params_of() if params is None else params
    return amp.optim.AdamW(given, lr=1e-2, max_grad_norm=1.0, offload=offload, **more)


def saved(optimizer: Any) -> Any:
    return copy.deepcopy(optimizer.state_dict())


@contextmanager
def without_memory(**what: bool) -> Iterator[None]:
    native.set_host_memory(**what)
    try:
        yield
    finally:
        native.set_host_memory()


def both(kind: Any, shapes: Any = SHAPES, dtype: torch.dtype = LOW, **options: Any) -> list[Any]:
    """Two optimizers of equal parameters, the first one offloaded."""
    given = {"check_overflow": True, **options}
    return [kind(params_of(shapes, dtype), **given, offload=o) for o in ("state", None)]


def models(dtype: torch.dtype = LOW) -> list[tuple[nn.Module, Any]]:
    found = []
    for offload in ("state", None):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)).to(DEVICE)
        amp.prepare(model, dtype)
        found.append((model, adamw(model.parameters(), offload=offload, memory="lean")))
    return found


def backward(model: nn.Module, step: int, scaler: Any = None) -> None:
    source = torch.Generator().manual_seed(step)
    weight = next(model.parameters())
    batch = torch.randn(8, 64, generator=source).to(DEVICE, weight.dtype)
    loss = model(batch).float().square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()
