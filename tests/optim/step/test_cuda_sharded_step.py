"""A step on DTensors on a GPU: the host waits for nothing, and few kernels are launched more.

torch's fake process group stands in for NCCL: one process is rank 0 of four, and a collective
copies what it sends, one copy for each rank. Runs where there is a GPU, and in any case on the
pretend one (test_pretend_gpu.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import PRETEND_GPU
from layouts import scaled
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore
from watching import Seen, watching

import amp_mp as amp

DEVICE = "cuda"
SHAPES = [(32, 64), (64,), (8,), (4, 32)]
WORLD = 4
Step = Callable[[], Any]
# Each collective's copies, and how many collectives, by layout.
COPIES = {"plain": (0, 0), "fsdp": (4, 1), "hsdp": (2, 1), "tp": (2, 1), "tp fsdp": (2, 2)}


@pytest.fixture(params=["cuda"], autouse=True)
def cuda(request: pytest.FixtureRequest) -> str:
    """In the names of all tests here, for those who choose by device."""
    request.getfixturevalue("four_ranks")
    return request.param


@pytest.fixture
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


def parameters(layout: str, dtype: torch.dtype) -> list[Any]:
    """With gradients. Under tensor parallelism the second is a norm's, which no plan names."""
    line = init_device_mesh(DEVICE, (WORLD,), mesh_dim_names=("dp",))
    square = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    places: dict[str, tuple[Any, list[Any]]] = {
        "fsdp": (line, [Shard(0)]),
        "hsdp": (square, [Replicate(), Shard(0)]),
        "tp": (square["tp"], [Shard(0)]),
        "tp fsdp": (square, [Shard(0), Shard(0)]),
    }
    params = []
    for index, shape in enumerate(SHAPES):
        mesh, placements = places.get(layout, (None, []))
        if index == 1 and "tp" in layout:
            mesh, placements = (square["dp"], [Shard(0)]) if "fsdp" in layout else (None, [])
        param = nn.Parameter(placed(shape, dtype, mesh, placements))
        param.grad = placed(shape, dtype, mesh, placements)
        params.append(param)
    return params


def placed(shape: tuple[int, ...], dtype: torch.dtype, mesh: Any, placements: list[Any]) -> Tensor:
    if mesh is None:
        return torch.randn(shape).to(DEVICE, dtype)
    own, _ = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    return DTensor.from_local(torch.randn(own).to(DEVICE, dtype), mesh, placements, run_check=False)


def plain_step(**options: Any) -> Callable[[list[Any]], Step]:
    return lambda params: amp.optim.AdamW(params, **options).step


def by_layer(kind: Any) -> Callable[[list[Any]], Step]:
    return lambda params: kind(params, lr=0.1).step


KINDS: dict[str, Callable[[list[Any]], Step]] = {
    "neither": plain_step(check_overflow=False),
    "clips": plain_step(max_grad_norm=1.0),
    "checks": plain_step(),
    "scaled": scaled(lambda params: amp.optim.AdamW(params, max_grad_norm=1.0), DEVICE),
    "LARS": by_layer(amp.optim.LARS),
    "NovoGrad": by_layer(amp.optim.NovoGrad),
    "LAMB": by_layer(amp.optim.LAMB),
    "torch's AdamW": scaled(lambda params: torch.optim.AdamW(params, fused=True), DEVICE),
}
# Kernels more than the plain step: amp_mp's, and torch's without the copies of the collectives.
MEASURING = {"fsdp": (2, 6), "hsdp": (2, 6), "tp": (3, 13), "tp fsdp": (3, 17)}
LAYERS = {"fsdp": (3, 12), "hsdp": (3, 12), "tp": (3, 16), "tp fsdp": (3, 21)}
MORE = {
    "neither": dict.fromkeys(MEASURING, (0, 0)),
    **dict.fromkeys(["clips", "checks", "scaled"], MEASURING),
    **dict.fromkeys(["LARS", "NovoGrad"], LAYERS),
    "LAMB": {"fsdp": (4, 16), "hsdp": (4, 16), "tp": (4, 20), "tp fsdp": (4, 30)},
    "torch's AdamW": {"fsdp": (1, 8), "hsdp": (1, 8)},  # torch's refuses to mix plain and DTensors
}


def third_step(kind: str, layout: str) -> Seen:
    step = KINDS[kind](parameters(layout, torch.float32))
    for _ in range(3):
        step()
    with watching() as seen:
        step()
    return seen


@pytest.mark.parametrize(("kind", "layout"), [(k, at) for k, more in MORE.items() for at in more])
def test_the_host_waits_for_nothing(kind: str, layout: str) -> None:
    plain, sharded = third_step(kind, "plain"), third_step(kind, layout)
    assert (plain.waits, sharded.waits) == (0, 0)
    copies, collectives = COPIES[layout]
    times = 0 if kind == "neither" else 2 if kind == "LAMB" else 1
    collectives *= times
    own, others = MORE[kind][layout]
    if "tp" in layout and not PRETEND_GPU:
        others += times  # an index_copy copies all rows first; the pretend GPU counts both as one
    assert sharded.kernels - plain.kernels <= own
    assert sharded.others - plain.others - copies * collectives <= others


@pytest.mark.parametrize("layout", ["fsdp", "tp fsdp"])
def test_a_step_without_some_gradients_waits_for_nothing_either(layout: str) -> None:
    params = parameters(layout, torch.bfloat16)
    optimizer = amp.optim.AdamW(params, max_grad_norm=1.0)
    for _ in range(2):
        optimizer.step()
    params[0].grad = None
    optimizer.step()
    with watching() as seen:
        optimizer.step()
    assert seen.waits == 0


def test_a_wait_is_seen() -> None:
    params = parameters("fsdp", torch.bfloat16)
    with watching() as seen:
        float(params[0].grad.to_local().norm())
    assert seen.waits > 0  # a profiler sees the copy to the host and the wait for it
