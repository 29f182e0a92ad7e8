"""The ways to split a model over the ranks of this process group, and what a rank holds of it.

Every rank can make the whole, plain model too, because all start from the same seed. So each rank
compares its own shards with a run of one process, and no test needs a collective to compare.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from helpers import raw_bytes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import amp_mp as amp

REPLICATED = ("step", "layer", "mu_product", "radius")  # states that every rank holds whole
# How far norms of the same gradients may be apart where other shards are summed, as part of
# themselves. docs/distributed.md has it for normal gradients, as these tests have;
# tests/optim/step/test_norm_error.py has the bound for all.
NORM_ERROR = 2.0**-24
# Names of a layout, with the numbers of ranks it can have. "rows" and "columns" are what
# RowwiseParallel and ColwiseParallel do: weights split along dimension 1 or 0. "tp" is both, one
# after the other, and "sp" adds norms that see a part of the sequence each.
LAYOUTS = {
    "fsdp": (1, 2, 4),
    "hsdp": (4,),
    "rows": (2, 4),
    "columns": (2, 4),
    "columns fsdp": (4,),
    "rows fsdp": (4,),
    "tp": (2, 4),
    "sp": (2, 4),
    "tp fsdp": (4,),
    "sp fsdp": (4,),
}


def mesh_of(layout: str) -> DeviceMesh:
    """All ranks, as the layout arranges them: 2x2 where it has two dimensions."""
    if layout == "hsdp":
        return made_once((2, 2), ("replicas", "dp"))
    if len(layout.split()) == 2:
        return made_once((2, 2), ("dp", "tp"))
    return made_once((dist.get_world_size(),), ("dp" if layout == "fsdp" else "tp",))


@cache
def made_once(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh; another one of the same ranks would have process groups of its own."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def shard(model: nn.Module, layout: str, **options: Any) -> Any:
    """The same model, split over the ranks. options: of fully_shard."""
    mesh, kind = mesh_of(layout), layout.split()[0]
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        model.parallelize(mesh["tp"], kind)  # type: ignore[operator]
    if "dp" in names:
        fully_shard(model, mesh=mesh if layout == "hsdp" else mesh["dp"], **options)
    return model


class Bag(nn.Module):
    """Parameters of the given shapes, from one seed; no forward."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            value = noise(shape, seed + index).to(dtype, copy=True)
            self.register_parameter(f"p{index}", nn.Parameter(value))

    def parallelize(self, mesh: DeviceMesh, kind: str) -> None:
        """Splits all along dimension 0, or, in "rows", along 1.

        The last parameter stays plain, as a norm that no plan names.
        """
        for name, param in list(self.named_parameters())[:-1]:
            at: Any = Shard(0)
            if kind == "rows":
                at = Shard(1) if param.dim() > 1 else Replicate()
            placed = distribute_tensor(param.detach(), mesh, [at])
            self.register_parameter(name, nn.Parameter(placed))


class Net(nn.Module):
    """A norm and two linear layers, from one seed; takes [batch, sequence, 32]."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out

    def parallelize(self, mesh: DeviceMesh, kind: str) -> None:
        """Tensor parallel ("tp"), where the norm stays plain, or sequence parallel ("sp")."""
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if kind == "sp":
            # Every rank is given the whole input, and the norm takes its part of the sequence.
            whole = {"input_layouts": Replicate(), "desired_input_layouts": Shard(1)}
            parallelize_module(self, mesh, PrepareModuleInput(**whole))
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Replicate()),
            }
        parallelize_module(self, mesh, plan)


@cache
def noise(shape: tuple[int, ...], seed: int) -> Tensor:
    """Normal float32 numbers, the same on all ranks; do not write into them."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def placed_as(param: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a whole tensor, placed as the parameter is; a plain copy beside a plain.

    No rank sends anything.
    """
    if not isinstance(param, DTensor):
        return whole.clone()
    return DTensor.from_local(
        whole.reshape(-1)[positions(param)].view(local(param).shape),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def local(tensor: Any) -> Tensor:
    """What this rank holds of a tensor."""
    found: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return found.detach()


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of a tensor, on all ranks; every rank has to call it."""
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()


def positions(param: Tensor) -> Tensor:
    """Which elements of the whole parameter, in row-major order, this rank holds; flat."""
    if not isinstance(param, DTensor):
        return torch.arange(param.numel())
    return _positions(tuple(param.shape), param.device_mesh, param.placements)


@cache
def _positions(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Any, ...]) -> Tensor:
    whole = torch.arange(math.prod(shape)).view(shape)
    placed = distribute_tensor(whole, mesh, placements, src_data_rank=None)  # nobody sends anything
    return local(placed).reshape(-1).clone()  # a view into `whole` where only one rank is there


def set_grads(params: list[Tensor], seed: int, scale: float = 1.0) -> list[Tensor]:
    """Gives every parameter its part of a seeded gradient; returns the whole gradients."""
    wholes = [noise(tuple(p.shape), seed + i).mul(scale).to(p.dtype) for i, p in enumerate(params)]
    for param, whole in zip(params, wholes, strict=True):
        param.grad = placed_as(param, whole)
    return wholes


def scaled(make: Callable[[list[Any]], Any], device: str = "cpu") -> Callable[[list[Any]], Any]:
    """Makes a step of parameters' optimizer: amp.GradScaler's step and update."""

    def made(params: list[Any]) -> Callable[[], None]:
        optimizer, scaler = make(params), amp.GradScaler(device, init_scale=1024.0)
        scaler.scale(torch.ones((), device=device))

        def step() -> None:
            scaler.step(optimizer)
            scaler.update()

        return step

    return made


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    """Steps with each parameter's part of the gradients that are numbered 100 apart."""
    params = list(model.parameters())
    for step in steps:
        set_grads(params, 100 * step)
        optimizer.step()


def same_elements(name: str, param: Tensor, whole: Tensor) -> Tensor:
    """Those elements of a whole state that a rank's part of it must equal; flat.

    param: the sharded parameter. whole: the state of that name of one process.
    """
    flat = whole.detach().reshape(-1)
    if name in REPLICATED:
        return flat
    shared = max(1, param.numel() // max(1, flat.numel()))  # elements of a group, or of a row
    return flat[positions(param)[::shared] // shared]


def differences(
    params: list[Any], optimizer: Any, plain: list[Any], plain_optimizer: Any
) -> list[str]:
    """Where a rank's weights and states are not, bit for bit, those of one process; in words."""
    found = []
    for param, whole in zip(params, plain, strict=True):
        state = {"weight": param, **optimizer.state[param]}
        wanted = {"weight": whole, **plain_optimizer.state[whole]}
        label = f"rank {dist.get_rank()}, {tuple(whole.shape)}"
        if set(state) != set(wanted):
            found.append(f"{label}: has {sorted(state)}, one process has {sorted(wanted)}")
        for name in sorted(set(state) & set(wanted)):
            expected = same_elements(name, param, wanted[name])
            own = local(state[name]).reshape(-1)
            if own.shape != expected.shape or own.dtype != expected.dtype:
                found.append(f"{label}: {name} is {own.dtype} {tuple(own.shape)}")
            elif raw_bytes(own) != raw_bytes(expected):
                found.append(f"{label}: {(own != expected).sum()} of {own.numel()} {name} differ")
    return found


def misplaced(optimizer: Any) -> list[str]:
    """States that are not DTensors placed as their parameters are."""
    found = []
    for param, state in optimizer.state.items():
        for name, value in state.items():
            wanted = isinstance(param, DTensor) and name not in REPLICATED
            if isinstance(value, DTensor) != wanted:
                found.append(f"{name} is a {type(value).__name__} beside a {type(param).__name__}")
            elif wanted and (value.device_mesh, value.placements) != (
                param.device_mesh,
                param.placements,
            ):
                found.append(f"{name} is placed as {value.placements}, not {param.placements}")
    return found


def parts_of(params: list[Any]) -> list[str]:
    """Names the part of each parameter that this rank holds; the same on ranks with the same."""
    return [digest(positions(param)) for param in params]


def digest(tensor: Tensor) -> str:
    data = local(tensor).reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()[:12]


def digests(
    params: list[Any], optimizer: Any, parts: list[str] | None = None
) -> dict[tuple[Any, ...], str]:
    """A digest of each tensor that this rank holds, by parameter, the part of it, and state.

    Ranks that hold the same part of a parameter have the same key, and must have the same digest.
    parts: parts_of(params), where it is known.
    """
    found = {}
    for index, (param, part) in enumerate(zip(params, parts or parts_of(params), strict=True)):
        for name, value in {"weight": param, **optimizer.state.get(param, {})}.items():
            key = (index, "" if name in REPLICATED else part, name)
            found[key] = digest(value) if isinstance(value, Tensor) else repr(value)
    return found


def disagreements(ranks: list[dict[tuple[Any, ...], Any]]) -> list[str]:
    """Which keys of several ranks' digests have values that are not all equal."""
    merged: dict[tuple[Any, ...], dict[int, Any]] = {}
    for rank, held in enumerate(ranks):
        for key, value in held.items():
            merged.setdefault(key, {})[rank] = value
    return [f"{k}: {v}" for k, v in merged.items() if len(set(map(repr, v.values()))) > 1]
