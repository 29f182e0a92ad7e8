"""Attached optimizers under DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import LOW, SCALE, Tied
from helpers import raw_bytes
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import amp_mp as amp
from amp_mp.optim.base import stepper_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]


class Conv(nn.Module):
    """Beside matrices a kernel in channels_last, whose bucket holds it in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1).to(memory_format=torch.channels_last)
        self.tail = Tied()
        self.tail.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 1, 8, 8).expand(-1, 3, -1, -1)
        return self.tail(self.conv(image).mean(1).flatten(1))


def train_replicas() -> list[Any]:
    """Three steps each with plain DDP and released; gradients, parameters and states of both."""
    rank, saved = dist.get_rank(), []
    for release, view in ((False, False), (True, False), (True, True)):
        torch.manual_seed(0)
        net = DistributedDataParallel(
            amp.prepare(Conv(), LOW), bucket_cap_mb=0.004, gradient_as_bucket_view=view
        )
        low = [p for p in net.parameters() if p.dtype == LOW]
        rest = [p for p in net.parameters() if p.dtype != LOW]
        scaler = amp.GradScaler("cpu", init_scale=SCALE)
        lean = amp.optim.AdamW(low, lr=0.01, memory="lean")
        plain = amp.optim.SGD(rest, lr=0.01, momentum=0.9)
        if release:
            for optimizer in (lean, plain):  # both on the one hook that there can be
                optimizer.attach(net, release=True, scaler=scaler)
        for step in range(3):
            if release and step == 2:  # removed, the hook is what DDP does without
                stepper_of(plain).attachment.remove()
                stepper_of(lean).attachment.remove()
                lean.attach(net, release=True, scaler=scaler)
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(9 * step + rank))
            if step == 1:  # gradients of two backwards, averaged with the second
                with net.no_sync():
                    scaler.scale(net(x.to(LOW)).float().square().mean()).backward()
            scaler.scale(net(x.to(LOW)).float().square().mean()).backward()
            saved.append(raw_bytes([p.grad for p in net.parameters()]))
            if not view:  # theirs still, not the bucket's
                assert all(p.grad.untyped_storage().nbytes() == p.nbytes for p in low)
            if step == 2:  # gradients by hand, which no hook has seen
                scaler.step(lean)
                scaler.update()
                for param in low:
                    param.grad.fill_(SCALE)
            for optimizer in (lean, plain):
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            saved.append(lean.grad_norm)
        saved.append(raw_bytes([[p.detach() for p in net.parameters()],
                                lean.state_dict(), plain.state_dict()]))  # fmt: skip
    sparse = DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
    optimizer = amp.optim.SGD(sparse.named_parameters(), lr=0.1)
    optimizer.attach(sparse, release=True)
    with pytest.raises(RuntimeError, match=r"module\.weight.*Sparse"):
        sparse(torch.tensor([1])).sum().backward()
    unused = DistributedDataParallel(Tied(), static_graph=True)
    optimizer = amp.optim.SGD(unused.named_parameters(), lr=0.1)
    optimizer.attach(unused, release=True)
    with pytest.raises(RuntimeError, match=r"module\.last\.weight.*no part in this backward"):
        unused(torch.ones(4, 64), True).square().sum().backward()
    wrong = DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True)
    optimizer = amp.optim.SGD(wrong.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="find_unused_parameters"):
        optimizer.attach(wrong, release=True)
    hooked = DistributedDataParallel(nn.Linear(2, 2))
    hooked.register_comm_hook(None, lambda state, bucket: None)
    optimizer = amp.optim.SGD(hooked.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="communication hook of its own"):
        optimizer.attach(hooked, release=True)
    with pytest.raises(ValueError, match="measure=True"):
        optimizer.attach(hooked, measure=True)
    with pytest.raises(ValueError, match="holds a DistributedDataParallel"):
        optimizer.attach(nn.Sequential(hooked), release=True)
    return saved


def test_replicas_that_step_in_the_hook_equal_plain_ones_bit_for_bit() -> None:
    first, second = on_ranks(2, train_replicas)
    assert first == second
    count = len(first) // 3
    assert first[:count] == first[count : 2 * count] == first[2 * count :]
