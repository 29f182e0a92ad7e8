"""Edits of masters on a GPU: the host does not wait, and CUDA graphs replay on what was written.

Runs where there is a GPU, and in any case on the pretend one (test_pretend_gpu.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_training import graph_of
from helpers import raw_bytes
from rules import STORAGES
from torch import nn
from watching import watching

import amp_mp as amp

DEVICE = "cuda"
pytestmark = pytest.mark.usefixtures("cuda")


def training(storage: str, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.ModuleDict, Any]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"q": nn.Linear(32, 64), "k": nn.Linear(32, 32)}).to(DEVICE, dtype)
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), **STORAGES[storage])
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.25)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_edit_waits(storage: str, dtype: torch.dtype) -> None:
    model, optimizer = training(storage, dtype)
    logits = torch.tensor([200.0, 50.0, 400.0, 100.0], device=DEVICE)
    for write in (lambda master: None, lambda master: master.mul_(1.01)):
        with watching() as seen:
            with optimizer.masters() as masters:
                for master in masters:
                    write(master)
            amp.optim.qk_clip_(optimizer, model["q"], model["k"], logits)
        assert seen.waits == 0


def test_what_is_written_behind_the_version_counter_is_stored() -> None:
    """As on a CPU: through `.data`; before the first step too."""
    model, optimizer = training("exact")
    fresh = amp.optim.AdamW(model.parameters())
    for each in (optimizer, fresh):
        with each.masters(model["q"].bias) as bias:
            bias.data.fill_(1 + 2**-12)
        with each.masters(model["q"].bias) as bias:
            assert bool((bias == 1 + 2**-12).all())


@pytest.mark.parametrize("storage", STORAGES)
def test_a_captured_step_goes_on_from_what_was_written(storage: str) -> None:
    runs = [training(storage) for _ in range(2)]
    for _, optimizer in runs:
        optimizer.step()
    graph = graph_of(runs[1][1])
    runs[0][1].step()  # what was captured has not run
    graph.replay()
    for factor in (1.01, 0.5):
        for model, optimizer in runs:
            with optimizer.masters(dict(model.named_parameters())) as masters:
                masters["q.weight"].mul_(factor)
        runs[0][1].step()
        graph.replay()
    torch.cuda.synchronize()
    eager, replayed = (
        raw_bytes([[p.detach() for p in m.parameters()], o.state_dict()["state"]]) for m, o in runs
    )
    assert eager == replayed
