"""Masters of sharded parameters, edited on 1, 2 and 4 processes, and QK-Clip on them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import Bag, Net, local, placed_as, set_grads, shard, whole
from ranks import on_ranks
from tiers import tiered
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import amp_mp as amp
from amp_mp.compat import set_layer_types

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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", ["exact", "lean"])
def test_processes_hold_the_bits_of_one(kind: str, memory: str) -> None:
    alone = edited("whole", memory)
    for world in (1, 2, 4):
        for found in on_ranks(world, edited, kind, memory):
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


SHAPES = [(96, 64), (33, 96), (33,), (3, 64), (1,)]
LAYOUTS = [("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("rows", 2), ("columns fsdp", 4)]


def make(params: Any, inner: str) -> amp.apex.parallel.LARC:
    kind = torch.optim.SGD if inner == "torch" else amp.optim.SGD
    return amp.apex.parallel.LARC(kind(params, lr=0.1, momentum=0.9, weight_decay=0.1), 0.05)


def steps(layout: str, inner: str) -> float:
    """The largest relative difference from one process, after three steps."""
    params = list(shard(Bag(SHAPES, torch.float32), layout).parameters())
    plain = list(Bag(SHAPES, torch.float32).parameters())
    ours, theirs = make(params, inner), make(plain, inner)
    worst = 0.0
    for step in range(3):
        set_grads(plain, 5 * step)
        set_grads(params, 5 * step)
        ours.step()
        theirs.step()
    for param, single in zip(params, plain, strict=True):
        wanted = local(placed_as(param, single.detach()))
        if wanted.numel():
            error = (local(param) - wanted).abs().max() / single.detach().abs().max()
            worst = max(worst, float(error))
    return worst


@pytest.mark.parametrize(
    ("layout", "world", "inner"),
    tiered(
        [(*each, inner) for inner in ("torch", "amp_mp") for each in LAYOUTS],
        [(*each, ("torch", "amp_mp")[n % 2]) for n, each in enumerate(LAYOUTS)],
    ),
)
def test_the_steps_are_those_of_one_process(layout: str, world: int, inner: str) -> None:
    """Norms add the same squares in another order, in float64; ratios are rounded to float32."""
    assert max(on_ranks(world, steps, layout, inner)) <= 4 * 2.0**-24


def gradients_still_to_be_added(world: int) -> bool:
    """A norm under sequence parallelism: each rank has the sum over its part of the sequence."""
    net = shard(Net(), "sp")
    larc = make(net.parameters(), "torch")
    torch.manual_seed(3)
    net(torch.randn(2, 4, 32)).square().mean().backward()
    unplaced = [p for p in net.parameters() if p.grad.placements != p.placements]
    before = [p.full_tensor().clone() for p in unplaced]
    larc.step()
    moved = [not torch.equal(p.full_tensor(), b) for p, b in zip(unplaced, before, strict=True)]
    return bool(moved) and all(moved) and all(isinstance(p, DTensor) for p in unplaced)


def test_gradients_that_are_sums_to_be_made_are_scaled_too() -> None:
    assert all(on_ranks(2, gradients_still_to_be_added, 2))


# Half storage, half storage with float32 math, and a second math type: each way through a layer.
MATHS: dict[str, dict[str, Any]] = {
    "half": {},
    "pseudo": {"default_forward_math": "FLOAT", "default_backward_math": "FLOAT"},
    "apart": {"default_backward_math": "FLOAT"},
}


def largest_difference(wrapper: str, maths: str, wrapped_first: bool) -> float:
    """Of a gradient from that of one process with the whole batch, relative to its largest."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(8, 16), nn.PReLU(), nn.LayerNorm(16), nn.Linear(16, 4))
    whole = copy.deepcopy(net)
    words = MATHS[maths] | dict.fromkeys(
        ["default_forward_type", "default_backward_type"], "FLOAT16"
    )
    set_layer_types(whole, **words)
    if not wrapped_first:
        set_layer_types(net, **words)
    model = net
    if wrapper == "ddp":
        model = DistributedDataParallel(net)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (net[0], net[3]):
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    if wrapped_first:
        set_layer_types(model, **words)
    x = torch.randn(6, 8)
    rank = dist.get_rank()
    model(x[3 * rank : 3 * rank + 3]).float().square().mean().backward()
    whole(x).float().square().mean().backward()
    worst = 0.0
    for param, wanted in zip(net.parameters(), whole.parameters(), strict=True):
        grad = param.grad.full_tensor() if wrapper == "fsdp" else param.grad
        worst = max(worst, float((grad - wanted.grad).abs().max() / wanted.grad.abs().max()))
    return worst


@pytest.mark.parametrize("wrapped_first", [False, True])
@pytest.mark.parametrize("maths", MATHS)
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_gradients_are_those_of_one_process(wrapper: str, maths: str, wrapped_first: bool) -> None:
    """Each process rounds its own gradients to float16, a few times 2^-11 of the largest."""
    assert max(on_ranks(2, largest_difference, wrapper, maths, wrapped_first)) < 8 * 2.0**-11
