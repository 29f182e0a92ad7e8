"""Masters of sharded parameters, edited on 1, 2 and 4 processes, and QK-Clip on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import amp_mp as amp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]
HEADS, SIZE, INPUTS = 6, 3, 8  # 18 rows: processes divide them inside of heads
KINDS = ("rows", "tensor parallel")


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Linear(INPUTS, HEADS * SIZE)
        self.k = nn.Linear(INPUTS, 2 * SIZE)
        self.o = nn.Linear(INPUTS, 1)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def edited(kind: str, memory: str) -> dict[str, Any]:
    """What an edit, QK-Clip and steps before and after leave, put together."""
    model: Any = Network()
    if kind == "rows":
        fully_shard(model)
    elif kind == "tensor parallel":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        plan = {"q": ColwiseParallel(), "k": ColwiseParallel(), "o": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
    amp.prepare(model, torch.bfloat16)
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-2, memory=memory)
    named = dict(model.named_parameters())
    found: dict[str, Any] = {}
    for moment in ("before the first step", "later"):
        with optimizer.masters(named) as masters:
            for name, master in masters.items():
                assert type(master) is type(named[name].data)
                if isinstance(master, DTensor):
                    assert master.placements == named[name].placements
                assert master.shape == named[name].shape
                master.mul_(1 + 2**-10).add_(2**-12)
        logits = torch.tensor([90.0, 130.0, 110.0, 400.0, 101.0, 250.0])
        found[f"gamma {moment}"] = amp.optim.qk_clip_(optimizer, model.q, model.k, logits)
        with optimizer.masters(named) as masters:
            found |= {f"{name} {moment}": whole(m) for name, m in masters.items()}
        for name, param in named.items():
            found[f"{name} {moment}, rounded"] = whole(param)
            param.grad = torch.full_like(param, 0.5)
        optimizer.step()
    return found


def same(kind: str, memory: str) -> dict[str, Any]:
    return edited(kind, memory)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", ["exact", "lean"])
def test_processes_hold_the_bits_of_one(kind: str, memory: str) -> None:
    alone = edited("whole", memory)
    for world in (1, 2, 4):
        for found in on_ranks(world, same, kind, memory):
            assert found.keys() == alone.keys()
            for name, value in found.items():
                assert torch.equal(value, alone[name]), (world, name)


def replicated_and_refused() -> list[str]:
    """A replicated DTensor, a shard of columns, and what is refused."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    values = torch.randn(4, 6)
    params = []
    for placement in (Replicate(), Shard(1)):
        made = torch.distributed.tensor.distribute_tensor(values.bfloat16(), mesh, [placement])
        params.append(nn.Parameter(made))
    optimizer = amp.optim.AdamW(params)
    with optimizer.masters() as masters:
        for master in masters:
            master.fill_(1 + 2**-12)
    versions = [param._version for param in params]
    with optimizer.masters(params):
        pass
    assert versions == [param._version for param in params]
    with optimizer.masters() as masters:
        for master in masters:
            assert torch.equal(whole(master), torch.full((4, 6), 1 + 2**-12))
    said = []
    for call in (optimizer.step, lambda: params[0].to_local().mul_(2)):
        try:
            with optimizer.masters(params[0]), torch.no_grad():
                call()
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_replicated_and_by_columns() -> None:
    for step, written in on_ranks(2, replicated_and_refused):
        assert "step() inside of a block" in step
        assert "parameter 0 of group 0 or its state was written" in written
