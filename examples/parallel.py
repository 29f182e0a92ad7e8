"""How the GPT of train_gpt.py is spread over the processes that torchrun starts."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace

import torch
from gpt import GPT
from gpt_settings import Settings, SettingsError
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


@dataclass(frozen=True)
class Processes:
    """The processes of a run.

    kind: "none", "ddp", "fsdp", "hsdp" or "tp". parts: into how many parts a batch is cut, and
    part: which of them is this process's. Tensor-parallel processes all have the whole batch.
    """

    kind: str = "none"
    rank: int = 0
    parts: int = 1
    part: int = 0
    mesh: DeviceMesh | None = None

    def shard(self, model: GPT, policy: MixedPrecisionPolicy) -> None:
        """Makes the float32 model's parameters DTensors; call it before amp_mp.prepare."""
        if self.kind in ("fsdp", "hsdp"):
            _fully_shard(model, self.mesh, policy)
        elif self.kind == "tp":
            _parallelize(model, self.mesh)

    def wrap(self, model: GPT) -> nn.Module:
        """What computes the forward: the model, in DistributedDataParallel for "ddp"."""
        return nn.parallel.DistributedDataParallel(model) if self.kind == "ddp" else model

    def own(self, batch: Tensor) -> Tensor:
        """This process's part of a batch."""
        return batch.chunk(self.parts)[self.part]

    def mean(self, loss: Tensor) -> float:
        """The mean of all processes' losses; waits for the device."""
        if self.parts == 1:
            return loss.item()
        total = loss.detach().clone()
        distributed.all_reduce(total)
        return total.item() / self.parts


def join(settings: Settings, device: torch.device) -> Processes:
    """This process's place among those of torchrun, which it connects to if nobody has.

    Raises SettingsError where the processes do not fit the settings, or there are none.
    """
    kind = settings.parallel
    if kind == "none":
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise SettingsError("several processes were started; choose one of --parallel")
        return Processes()
    if not distributed.is_initialized():
        if "RANK" not in os.environ:
            raise SettingsError(
                f"parallel {kind} needs torchrun: torchrun --nproc_per_node 2 "
                f"examples/train_gpt.py --parallel {kind}"
            )
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    found = Processes(kind, rank, ranks, rank)
    if kind == "hsdp":
        if ranks % settings.replicas:
            raise SettingsError(f"replicas {settings.replicas} do not divide {ranks} processes")
        shape, names = (settings.replicas, ranks // settings.replicas), ("replicate", "shard")
        found = replace(found, mesh=init_device_mesh(device.type, shape, mesh_dim_names=names))
    elif kind in ("fsdp", "tp"):
        found = replace(found, mesh=init_device_mesh(device.type, (ranks,)))
    if kind == "tp":
        for name in ("width", "heads"):
            if getattr(settings, name) % ranks:
                raise SettingsError(
                    f"{name} {getattr(settings, name)} is not divisible by {ranks} processes"
                )
        found = replace(found, parts=1, part=0)
    if settings.batch % found.parts:
        raise SettingsError(f"batch {settings.batch} is not divisible by {ranks} processes")
    return found


def leave() -> None:
    """Ends the script once all processes are done; returns where there is no process group.

    With gloo not by return: in a process that ends tidily a thread of gloo may wait for Python's
    lock for ever, or abort, once in some ten to twenty runs.
    """
    if not distributed.is_initialized():
        return
    distributed.barrier()
    if distributed.get_backend() == "gloo":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    distributed.destroy_process_group()


def _fully_shard(model: GPT, mesh: DeviceMesh | None, policy: MixedPrecisionPolicy) -> None:
    """FSDP2, or HSDP on a mesh of two dimensions.

    The norms are a unit of their own, because prepare keeps them in float32 and a unit has one
    dtype. The root's own are the embeddings.
    """
    norms = [norm for block in model.blocks for norm in (block.attention_norm, block.mlp_norm)]
    fully_shard([*norms, model.norm], mesh=mesh, reshard_after_forward=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model.head, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)


def _parallelize(model: GPT, mesh: DeviceMesh | None) -> None:
    """Tensor parallel: each process has some rows or columns of every weight matrix of the blocks.

    The first layer of the MLP is cut by its outputs and the second by its inputs, so that one sum
    over the processes ends them. The rows of `qkv` are not ordered by heads, so its output is
    gathered and every process computes all heads.
    """
    assert mesh is not None
    for block in model.blocks:
        plan = {
            "qkv": ColwiseParallel(output_layouts=Replicate()),
            "attention_out": RowwiseParallel(input_layouts=Replicate()),
            "mlp_in": ColwiseParallel(),
            "mlp_out": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    parallelize_module(model.head, mesh, ColwiseParallel(output_layouts=Replicate()))
