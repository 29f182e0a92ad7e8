"""Float16 gradients under DDP and FSDP2 are the true ones after each loss, whatever its scale.

Weights, inputs and scales are whole numbers and powers of two, so that every sum is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import amp_mp as amp
from amp_mp.scaling import Backoff

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

RATE = 2.0**-8


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


LAYOUTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "DDP, views of buckets": lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True),
    "DDP, static graph": lambda m: DistributedDataParallel(m, static_graph=True),
    "FSDP2": sharded,
}


class Handle:
    """amp.init."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._handle = amp.init(device_type="cpu", loss_scale=Backoff(1, 2.0**8))

    def backward(self, loss: Tensor, scale: float) -> None:
        """The script's block."""
        self._handle.loss_scaler.scale = scale
        with self._handle.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()


class Wrapper:
    """FP16_Optimizer."""

    def __init__(self, optimizer: Any) -> None:
        policy = Backoff(1, 2.0**8)
        self.optimizer = amp.FP16_Optimizer(optimizer, loss_scale=policy, verbose=False)

    def backward(self, loss: Tensor, scale: float) -> None:
        """The script's call."""
        self.optimizer.loss_scale = scale
        self.optimizer.backward(loss)


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(layout: str, kind: str, way: Any) -> list[str]:
    """Three steps with two losses each; returns what was not as expected."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False)).half()
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(16).reshape(4, 4) - 8)
    wanted = model[0].weight.detach().float().clone()
    net = LAYOUTS[layout](model)
    (param,) = net.parameters()
    package = amp.optim if kind == "ours" else torch.optim
    run = way(package.SGD(net.parameters(), lr=RATE))
    wrong = []
    for step in range(3):
        true = torch.zeros(4, 4)
        for number, scale in enumerate((8.0, 2.0)):
            inputs = [torch.arange(8.0).reshape(2, 4) + step + number + rank for rank in range(2)]
            true += torch.stack(inputs).mean(0).sum(0)
            run.backward(net(inputs[dist.get_rank()].half()).float().sum(), scale)
            (shown,) = run.optimizer.param_groups[0]["params"]
            if not torch.equal(whole(shown.grad).float(), true):
                wrong.append(f"gradient of step {step}, loss {number}: {whole(shown.grad)}")
        run.optimizer.step()
        wanted -= RATE * true
        if not torch.equal(whole(param.detach()), wanted.half()):
            wrong.append(f"weight after step {step}")
        run.optimizer.zero_grad()
    net(inputs[0].half()).float().sum().backward()  # and a script may go on without a loss scale
    if param.grad is None or param.grad.dtype != torch.float16:
        wrong.append("a plain backward")
    return wrong


def without_reduction(layout: str) -> list[Any]:
    """Two steps of a loss in no_sync and one after it, with gradients cleared to zeros."""
    model = nn.Linear(4, 1, bias=False).half()
    nn.init.zeros_(model.weight)
    net: Any = LAYOUTS[layout](model)
    inner = amp.optim.SGD(net.parameters(), lr=1.0)
    optimizer = amp.FP16_Optimizer(inner, static_loss_scale=8.0, verbose=False)
    inputs = torch.ones(1, 4).half() * (1 + dist.get_rank())
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        with net.no_sync():
            optimizer.backward(net(inputs).float().sum(), update_master_grads=False)
        optimizer.backward(net(inputs).float().sum())
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    net(inputs).float().sum().backward()  # a plain one adds to the zeros
    return model.weight.tolist()[0] + model.weight.grad.tolist()[0]


@pytest.mark.parametrize("layout", ["DDP", "DDP, views of buckets"])
def test_losses_before_the_reduction_of_gradients(layout: str) -> None:
    """Means of (1, 2) and of both losses: 3 a step."""
    assert on_ranks(2, without_reduction, layout) == [[-6.0] * 4 + [1.5] * 4] * 2


@pytest.mark.parametrize("way", [Handle, Wrapper])
@pytest.mark.parametrize("kind", ["ours", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_true_after_each_loss(layout: str, kind: str, way: Any) -> None:
    assert on_ranks(2, train, layout, kind, way) == [[], []]
