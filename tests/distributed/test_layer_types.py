"""Layer types beside DistributedDataParallel and fully_shard: the gradients of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from amp_mp.compat import set_layer_types

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

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
