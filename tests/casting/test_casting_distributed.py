"""DDP and FSDP2 over two processes, and compiled graphs of processes with different tables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from layouts import whole
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import amp_mp as amp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

LOW = torch.bfloat16
ROWS, SIZE = 64, 256


def run() -> dict[str, list[Tensor]]:
    """What each process does."""
    found = {wrap: train(wrap) for wrap in ("alone", "ddp", "fsdp2")}
    return found | {kind: prepared(kind) for kind in ("FP16_Optimizer", "amp SGD")}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE))


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


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, list[Tensor]]]:
    """What `run` finds in each of two processes."""
    return on_ranks(2, run)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_distributed_models_train_as_alone(ranks: list[dict[str, list[Tensor]]], wrap: str) -> None:
    for found in ranks:
        assert len(found[wrap]) == len(found["alone"])
        for a, b in zip(found["alone"], found[wrap], strict=True):
            # The mean of two equal gradients is exact; a matrix product of the same numbers may add
            # up in another order, and then round to a neighbour in bfloat16.
            torch.testing.assert_close(b, a, rtol=2.0**-7, atol=1e-5)


@pytest.mark.parametrize("kind", ["FP16_Optimizer", "amp SGD"])
def test_masters_agree_on_ranks_that_started_from_different_seeds(
    ranks: list[dict[str, list[Tensor]]], kind: str
) -> None:
    first, second = (found[kind] for found in ranks)
    assert len(first) == len(second) == 4
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


COMPILED = """
import sys
import torch
import amp_mp as amp

amp.init(device_type="cpu", dtype=torch.bfloat16, loss_scale=1.0)
amp.set_policy("aten::gelu", sys.argv[1])
gelu = torch.compile(torch.nn.functional.gelu, fullgraph=True)
print(gelu(torch.ones(64, dtype=torch.bfloat16)).dtype)
"""


@pytest.mark.full
def test_processes_with_different_tables_share_no_compiled_graph(tmp_path: Path) -> None:
    """The cache on disk is torch's: without a tag it hands out the other process's graph."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    found = [
        subprocess.run(
            [sys.executable, "-c", COMPILED, policy],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for policy in ("float32", "unchanged", "float32")
    ]
    assert found == ["torch.float32", "torch.bfloat16", "torch.float32"]
