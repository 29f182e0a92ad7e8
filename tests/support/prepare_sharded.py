"""What tests/distributed/test_prepare_sharded.py runs in each process, and the models for it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import permutations, product
from typing import Any

import torch
import torch.distributed as dist
from around_sharding import error as message
from around_sharding import even as two_layers
from around_sharding import net as network
from layouts import placed_as, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import amp_mp as amp
from amp_mp import _C
from amp_mp.optim.state.kept_masters import refuse_lost

BF16 = torch.bfloat16
Found = dict[str, object]


def sharded(model: nn.Sequential | None = None) -> nn.Sequential:
    """The norm as a unit of its own, the first layer as another, the rest as the root's."""
    model = network() if model is None else model
    fully_shard([model[1]], reshard_after_forward=False)
    fully_shard(model[0])
    fully_shard(model)
    return model


def batch() -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).to(BF16)


def locals_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the memory that each parameter has on this process."""
    return {n: p.to_local().detach().clone() for n, p in model.named_parameters()}


def originals(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: original_of(param) for name, param in model.named_parameters()}


def original_of(param: Tensor) -> Tensor | None:
    record = _C.weight_of(param)
    kept = record is not None and record.is_unwritten(param)
    return _C.float32_of(param) if kept else None


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
        "master": _C.float32_of(model[0].weight),
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
        "late": message(lambda: refuse_lost(late[0].weight)),
        "late step": message(lambda: step_after(late)),
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


# Stages.


def stages() -> Found:
    """40 optimizers of 2 steps far below the rounding; how far each element of a shard has gone."""
    found: Found = {}
    for name in ("fully_shard", "tensor parallel", "not prepared", "moved"):
        model = two_layers()
        if name == "tensor parallel":
            mesh = init_device_mesh("cpu", (2,))
            parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        else:
            fully_shard(model)
        if name == "not prepared":
            amp.apex.fp16_utils.convert_network(model, BF16)
        else:
            amp.prepare(model, BF16)
        before = {n: v.to_local() for n, v in amp.float32_state_dict(model).items()}
        for stage in range(40):
            memory = ("exact", "float32", "lean")[stage % 3]
            optimizer = amp.optim.SGD(model.parameters(), lr=1e-4, memory=memory)
            for _ in range(2):
                model(batch()).float().sum().backward()
                for param in model.parameters():
                    param.grad = torch.ones_like(param)
                optimizer.step()
            del optimizer
            gc.collect()
            if name == "moved":
                model.to(memory_format=torch.contiguous_format)
                model.to("cpu")
        after = amp.float32_state_dict(model)
        found[name] = {n: after[n].to_local() - value for n, value in before.items()}
    late = amp.prepare(network(), BF16, keep_fp32_only=[])
    step_after(late)
    fully_shard(late)
    found["sharded after a step"] = message(lambda: step_after(late))
    return found


# Values and bytes.


def loading() -> Found:
    """Values that a state dict brings: after prepare, after a forward, on the meta device."""
    values = {n: torch.randn_like(p) for n, p in network().named_parameters()}

    def load(model: nn.Module) -> dict[str, Tensor | None]:
        params = dict(model.named_parameters())
        part = {
            n: distribute_tensor(v, params[n].device_mesh, params[n].placements)
            for n, v in values.items()
        }
        model.load_state_dict(part)
        return originals(model)

    after = amp.prepare(sharded(), BF16)
    ran = amp.prepare(sharded(), BF16)
    names = [n for n, _ in ran.named_parameters()]
    shapes = {n: p.shape for n, p in ran.named_parameters()}
    with torch.no_grad():
        ran(batch())  # leaves the root's parameters gathered
    mesh = init_device_mesh("cpu", (2,))
    part = {n: distribute_tensor(values[n], mesh, [Shard(0)]) for n in names}
    ran.load_state_dict(part)
    return {
        "shapes": shapes,
        "wanted": {n: v.to_local() for n, v in part.items()},
        "after prepare": load(after),
        "after a forward": originals(ran),
    }


def orders_of_calls() -> list[tuple[str, ...]]:
    """All in which a model can be made, prepared, sharded and loaded, or not sharded."""
    found = []
    for begin, load, shards in product(("real", "meta"), ("load", "assign"), ((), ("shard",))):
        empties = ("to_empty",) if (begin, load) == ("meta", "load") else ()
        for calls in permutations(("prepare", load, *shards, *empties)):
            if not empties or calls.index("to_empty") < calls.index(load):
                found.append((begin, *calls))
    return found


def after(calls: Sequence[str], values: dict[str, Tensor]) -> nn.Module:
    """The model after these calls; `values` are loaded, and assigned as torch does it."""
    with torch.device("meta" if calls[0] == "meta" else "cpu"):
        model: nn.Sequential = network()
    for call in calls[1:]:
        if call == "prepare":
            amp.prepare(model, BF16)
        elif call == "shard":
            sharded(model)
        elif call == "to_empty":
            model.to_empty(device="cpu")
        else:
            params = dict(model.named_parameters())
            state = {n: placed_as(params[n], v.clone()) for n, v in values.items()}
            model.load_state_dict(state, assign=call == "assign")
    return model


def orders() -> dict[tuple[str, ...], str]:
    """What is wrong with the masters after each order of calls: nothing, a name or an error.

    Before a step, after one, and when values are loaded after it.
    """
    values = {n: torch.randn_like(p) for n, p in network().named_parameters()}
    found = {}
    for calls in orders_of_calls():
        model = after(calls, values)
        optimizer = amp.optim.SGD(model.parameters(), lr=0.0, master="float32")
        wrong = differing(amp.float32_state_dict(model, optimizer), values)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        try:
            optimizer.step()
            wrong += differing(amp.float32_state_dict(model, optimizer), values)
        except RuntimeError as error:
            wrong = [str(error)]
        else:
            others = {
                n: torch.randn_like(v, dtype=torch.float32) for n, v in model.named_parameters()
            }
            model.load_state_dict(others)
            given = {n: whole(v) for n, v in others.items()}
            wrong += differing(amp.float32_state_dict(model), given)
        found[calls] = " ".join(wrong)
    return found


def differing(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    return [n for n, v in wanted.items() if not torch.equal(whole(found[n]), v)]


def float32_weights() -> Found:
    """float32_state_dict before a step: the originals, as DTensors."""
    model = sharded()
    before = locals_of(model)
    amp.prepare(model, BF16)
    found = amp.float32_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return {
        "before": before,
        "kinds": {type(v) for v in found.values()} == {DTensor},
        "found": {n: v.to_local() for n, v in found.items()},
        "one by one": {n: amp.float32_of(p).to_local() for n, p in model.named_parameters()},
        "placed": all(amp.float32_of(p).placements == p.placements for p in model.parameters()),
    }


def masters() -> Found:
    """Masters after steps that change nothing, after training, and after loading others."""
    batches = [batch() for _ in range(3)]
    found: Found = {}
    for lr in (0.0, 0.01):
        model = sharded()
        found["before"] = locals_of(model)
        amp.prepare(model, BF16)
        optimizer = amp.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, memory="exact")
        for x in batches:
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = amp.float32_state_dict(model, optimizer)
        found[f"lr {lr}"] = {n: v.to_local() for n, v in state.items()}
        found[f"whole {lr}"] = {n: v.full_tensor() for n, v in state.items()}
    others = {n: torch.randn_like(v) for n, v in state.items()}
    amp.load_float32_state_dict(model, optimizer, others)
    state = amp.float32_state_dict(model, optimizer)
    found["others"] = {n: v.to_local() for n, v in others.items()}
    found["loaded"] = {n: v.to_local() for n, v in state.items()}
    return found


def measured_bytes() -> Found:
    """Bytes of the shards, and what forward and backward receive, for float32 and bf16 shards."""
    found = {}
    for name in ("float32", "bfloat16"):
        model = nn.Linear(64, 96, bias=False)
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
        fully_shard(model, mp_policy=policy, reshard_after_forward=True)
        if name == "bfloat16":
            amp.prepare(model, BF16)
        gather = Counted(dist.all_gather_into_tensor, "output_tensor")
        scatter = Counted(dist.reduce_scatter_tensor, "input_tensor")
        model.set_custom_all_gather(gather)
        model.set_custom_reduce_scatter(scatter)
        model(torch.ones(4, 64, dtype=BF16)).float().sum().backward()
        local = model.weight.to_local()
        gradient = model.weight.grad.to_local()
        found[name] = {
            "all_gather": gather.bytes,
            "reduce": scatter.bytes,
            "weights": local.nbytes,
            "gradients": gradient.nbytes,
        }
    return found


class Counted:
    """FSDP2's own collective, counting what a ring brings to this process."""

    def __init__(self, collective: Callable[..., object], whole: str) -> None:
        self.collective, self.whole, self.bytes = collective, whole, 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, **tensors: Any) -> object:
        self.bytes += tensors[self.whole].nbytes // 2  # of two processes
        output, source = tensors.pop("output_tensor"), tensors.pop("input_tensor")
        return self.collective(output, source, **tensors)
