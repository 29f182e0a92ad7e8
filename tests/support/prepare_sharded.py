"""What tests/distributed/test_prepare_sharded.py runs in each process: prepare itself."""

from __future__ import annotations

import torch
from around_sharding import error as message
from around_sharding import even as two_layers
from around_sharding import net as network
from sharded_networks import BF16, Found, batch, locals_of, originals, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import amp_mp as amp
from amp_mp.optim.state.original_values import original_of, take_original


def shard_then_prepare() -> Found:
    """Shards, prepares, runs forward and backward."""
    model = sharded()
    params, before = list(model.parameters()), locals_of(model)
    params[0].user_attribute = "stays"
    amp.prepare(model, BF16)
    after = locals_of(model)
    kept = originals(model)
    output = model(batch())
    output.float().square().mean().backward()
    return {
        "same objects": all(a is b for a, b in zip(params, model.parameters(), strict=True)),
        "attribute": params[0].user_attribute,
        "before": before,
        "after": after,
        "wrapper dtypes": {n: p.dtype for n, p in model.named_parameters()},
        "originals": kept,
        "after training": originals(model),
        "output": output.detach(),
        "gradients": {n: p.grad.full_tensor() for n, p in model.named_parameters()},
        "again": message(lambda: amp.prepare(model, BF16)),
    }


def writes_are_noticed() -> Found:
    model = amp.prepare(sharded(), BF16)
    with torch.no_grad():
        model[0].weight.neg_()
    before = locals_of(model)
    return {
        "dropped": original_of(model[0].weight) is None,
        "master": take_original(model[0].weight),
        "weight": before["0.weight"],
        "other": original_of(model[2].weight) is not None,
    }


def other_dtypes() -> Found:
    """float16, then bfloat16, then float32 for what was kept; and convert_network."""
    model = sharded()
    before = locals_of(model)
    amp.prepare(model, torch.float16)
    amp.prepare(model, BF16)
    converted = sharded()
    amp.apex.fp16_utils.convert_network(converted, torch.float16, keep_fp32_only=[])
    return {
        "before": before,
        "originals": originals(model),
        "after": locals_of(model),
        "converted": locals_of(converted),
        "converted keeps": originals(converted),
    }


def refusals() -> Found:
    ran = sharded()
    ran(batch().float())
    gathered = sharded()
    gathered[0].unshard()
    mixed = network()
    fully_shard(mixed)
    before = locals_of(mixed)
    alone = network()
    fully_shard(alone)
    whole = sharded()
    late = amp.prepare(network(), BF16, keep_fp32_only=[])
    fully_shard(late)
    found = {
        "ran": message(lambda: amp.prepare(ran, BF16)),
        "gathered": message(lambda: amp.prepare(gathered, BF16)),
        "mixed": message(lambda: amp.prepare(mixed, BF16)),
        "alone": message(lambda: amp.prepare(alone, BF16, keep_fp32_only=["3.bias"])),
        "part": message(lambda: amp.prepare(whole[2], BF16)),
        "late": message(lambda: take_original(late[0].weight)),
        "late step": message(lambda: step_after(late)),
        "average": message(lambda: amp.AveragedModel(whole)),
    }
    unchanged = locals_of(mixed)
    return {
        **found,
        "unchanged": all(torch.equal(unchanged[n], v) for n, v in before.items()),
        "then": amp.prepare(mixed, BF16, keep_fp32_only=[])(batch()).dtype,
    }


def step_after(model: nn.Module) -> None:
    """A training step of an amp_mp optimizer."""
    optimizer = amp.optim.SGD(model.parameters(), lr=0.1)
    model(batch()).float().sum().backward()
    optimizer.step()


def tensor_parallel() -> Found:
    mesh = init_device_mesh("cpu", (2,))
    model = two_layers()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    before = locals_of(model)
    amp.prepare(model, BF16)
    output = model(batch())
    output.float().square().mean().backward()
    return {
        "before": before,
        "after": locals_of(model),
        "originals": originals(model),
        "output": output.detach(),
        "dtypes": {n: p.grad.dtype for n, p in model.named_parameters()},
    }


def two_dimensions() -> Found:
    """Tensor parallel and fully_shard, or replicas, on a mesh of 2 x 2 processes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    found: Found = {}
    for name in ("tensor parallel", "replicas"):
        model = two_layers()
        if name == "tensor parallel":
            plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
            parallelize_module(model, mesh["inner"], plan)
            fully_shard(model, mesh=mesh["outer"])
        else:
            fully_shard(model, mesh=mesh)
        before = locals_of(model)
        amp.prepare(model, BF16)
        after, kept = locals_of(model), originals(model)
        optimizer = amp.optim.AdamW(model.parameters(), lr=0.01, max_grad_norm=1.0, memory="tiny")
        losses = []
        for _ in range(3):
            loss = model(batch()).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found[name] = {"before": before, "after": after, "originals": kept, "losses": losses}
    return found
