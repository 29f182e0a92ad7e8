"""What tests run in several processes that share their gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import amp_mp as amp

LOW = torch.bfloat16
ROWS, SIZE = 64, 256


def run() -> dict[str, list[Tensor]]:
    """What each process of test_casting_distributed.py does."""
    found = {wrap: train(wrap) for wrap in ("alone", "ddp", "fsdp2")}
    return found | {kind: prepared(kind) for kind in ("FP16_Optimizer", "amp SGD")}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE))


def whole(value: Tensor) -> Tensor:
    """A sharded parameter gathered; any other as it is."""
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def train(wrap: str) -> list[Tensor]:
    """Weights after two steps, and the output after those were overwritten by hand.

    wrap: "ddp", "fsdp2" or "alone"; every rank has the same batch, whose mean gradient is its own.
    """
    # "torch": products are cast on any processor.
    amp.init(device_type="cpu", dtype=LOW, loss_scale=1.0, policies="torch")
    net = model()
    if wrap == "ddp":
        net = nn.parallel.DistributedDataParallel(net)
    elif wrap == "fsdp2":
        fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    x = torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        optimizer.zero_grad()
        out = net(x)
        assert out.dtype == LOW
        out.float().square().mean().backward()
        optimizer.step()
    weights = [whole(p) for p in net.parameters()]
    with torch.no_grad():
        before = net(x)
        for param in net.parameters():  # no optimizer says that these change
            param.mul_(0.5)
        after = net(x)
    assert not torch.equal(before, after), "the output after a change by hand is a stale one"
    amp.casting.uninstall()
    return [*weights, after]


def prepared(kind: str) -> list[Tensor]:
    """This rank's masters and weights after some steps of ranks that start from different seeds.

    DDP sends rank 0's rounded weights to all.
    """
    torch.manual_seed(torch.distributed.get_rank())
    net = nn.parallel.DistributedDataParallel(amp.prepare(nn.Linear(8, 8), LOW))
    if kind == "FP16_Optimizer":
        wrapped = amp.FP16_Optimizer(torch.optim.SGD(net.parameters(), lr=0.1), verbose=False)
        backward, optimizer = wrapped.backward, wrapped
    else:
        backward, optimizer = torch.Tensor.backward, amp.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(LOW)
    for _ in range(5):
        optimizer.zero_grad()
        backward(net(x).float().square().mean())
        optimizer.step()
    if kind == "FP16_Optimizer":
        masters = optimizer.param_groups[0]["params"]
    else:
        masters = [*amp.float32_state_dict(net, optimizer).values()]
    return [t.detach() for t in (*masters, *net.parameters())]
