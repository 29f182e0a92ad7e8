"""amp.Changes beside CUDA graphs and streams: replays note what they change.

Runs where there is a GPU, and in any case on the pretend one (test_pretend_gpu.py).
"""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from cuda_training import DEVICE
from helpers import PRETEND_GPU
from torch import nn

import amp_mp as amp

pytestmark = pytest.mark.usefixtures("cuda")


def bits(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().view(torch.int16).flatten().clone() for param in model.parameters()]


def training(memory: str) -> tuple[nn.Module, amp.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.Linear(300, 7)).to(DEVICE, torch.bfloat16)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer = amp.optim.AdamW(
        model.parameters(), lr=1e-3, memory=memory, max_grad_norm=1.0, check_overflow=True
    )
    return model, optimizer


def fill(model: nn.Module, step: int, overflow: bool = False) -> None:
    for param in model.parameters():
        source = torch.Generator().manual_seed(step)
        assert param.grad is not None
        param.grad.copy_(torch.randn(param.shape, generator=source))
        if overflow:
            param.grad.view(-1)[3] = torch.nan


@pytest.mark.parametrize("memory", ["exact", "lean", "tiny", "float32"])
def test_replays_note_what_they_change(memory: str) -> None:
    model, optimizer = training(memory)
    changes, receiver = amp.Changes(model), copy.deepcopy(model)
    for step in range(3):
        fill(model, step)
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    amp.apply_changes(receiver, changes.take())
    wanted = [torch.zeros_like(each, dtype=torch.bool) for each in bits(model)]
    for step in range(3, 9):
        before = bits(model)
        fill(model, step, overflow=step == 5)
        graph.replay()
        for where, old, new in zip(wanted, before, bits(model), strict=True):
            where |= old != new
        if step % 3 == 2:
            taken = changes.take()
            for (name, _), where in zip(model.named_parameters(), wanted, strict=True):
                assert torch.equal(taken[name].positions.long(), where.nonzero().flatten()), name
                where.zero_()
            amp.apply_changes(receiver, taken)
            assert all(map(torch.equal, bits(receiver), bits(model)))


def test_a_graph_outlives_the_object() -> None:
    """Its replays write to memory that is kept for them."""
    model, optimizer = training("exact")
    changes = amp.Changes(model)
    fill(model, 0)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    del changes
    gc.collect()
    others = [
        torch.zeros(each.numel() // 64 + 1, dtype=torch.int64, device=DEVICE)
        for each in bits(model)
    ]
    for step in range(1, 4):
        fill(model, step)
        graph.replay()
    assert not any(other.any() for other in others)
    fresh, receiver = amp.Changes(model), copy.deepcopy(model)
    fill(model, 4)
    graph.replay()  # which does not know of it: all counts as written by others
    taken = fresh.take()
    assert all(len(taken[name].positions) == p.numel() for name, p in model.named_parameters())
    amp.apply_changes(receiver, taken)
    assert all(map(torch.equal, bits(receiver), bits(model)))


def test_it_takes_no_launch_and_no_wait_of_a_step() -> None:
    if not PRETEND_GPU:
        pytest.skip("launches are counted on the pretend GPU")
    from pretend_gpu.device import ledger

    counts = []
    for watched in (False, True):
        model, optimizer = training("lean")
        changes = amp.Changes(model) if watched else None
        for step in range(3):
            fill(model, step)
            with ledger() as found:
                optimizer.step()
        counts.append((found.launches, found.waits))
        assert watched == (changes is not None)
    assert counts[0] == counts[1] == (3, 0)
