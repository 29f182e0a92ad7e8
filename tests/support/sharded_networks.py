"""Models that tests/support/prepare_*.py shard and prepare, and what they read of them."""

from __future__ import annotations

import torch
from around_sharding import net
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from amp_mp.optim.state.original_values import original_of

BF16 = torch.bfloat16
Found = dict[str, object]


def sharded(model: nn.Sequential | None = None) -> nn.Sequential:
    """The norm as a unit of its own, the first layer as another, the rest as the root's."""
    model = net() if model is None else model
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
