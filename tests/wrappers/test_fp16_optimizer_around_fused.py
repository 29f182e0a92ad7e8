"""FP16_Optimizer around a fused optimizer gives the same results without copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import raw_bytes
from wrapping import Mixed, masters_of, train_step, wrap

import amp_mp as amp

# Around amp_mp's own optimizers: the same results, and no copies.

FUSED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "AdamW": (
        lambda p: amp.optim.AdamW(p, lr=1e-2, master="float32"),
        lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    ),
    "SGD": (
        lambda p: amp.optim.SGD(p, lr=0.1, momentum=0.9, master="float32"),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    ),
}


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", FUSED)
def test_the_folded_path_equals_the_one_with_copies(
    device: str, name: str, clip: float | None
) -> None:
    ours, torchs = (Mixed(torch.float16).to(device) for _ in range(2))
    torchs.load_state_dict(ours.state_dict())
    folded = wrap(FUSED[name][0](ours.parameters()), dynamic_loss_scale=True)
    copied = wrap(FUSED[name][1](torchs.parameters()), dynamic_loss_scale=True)
    for optimizer in (folded, copied):
        optimizer.loss_scale = 256.0
    for step in range(8):
        x = torch.randn(5, 4, device=device) * (math.inf if step == 3 else 1.0)
        for optimizer, model in ((folded, ours), (copied, torchs)):
            optimizer.zero_grad()
            optimizer.backward(model(x).float().square().mean())
            if clip is not None:
                norm = optimizer.clip_master_grads(clip)
                assert (norm == -1) == (step == 3)
            optimizer.step()
        assert folded.loss_scale == copied.loss_scale
        for a, b in zip(masters_of(folded), masters_of(copied), strict=True):
            # float32 updates in another order of operations: a few roundings of 2^-24 a step
            torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-5, atol=1e-6)


def test_the_folded_path_makes_no_second_copy(device: str) -> None:
    model = Mixed(torch.bfloat16).to(device)
    inner = amp.optim.AdamW(model.parameters(), lr=1e-2, master="float32")
    optimizer = wrap(inner, static_loss_scale=8.0)
    params = list(model.parameters())
    assert [p for group in optimizer.param_groups for p in group["params"]] == params
    optimizer.backward(model(torch.randn(5, 4, device=device)).float().sum())
    low = optimizer.fp16_groups[0][0]
    (inspected, *_), *_ = optimizer.inspect_master_grad_data() or [[None]]
    assert inspected is not None
    assert torch.equal(inspected, low.grad.float() / 8), "made for the occasion"
    assert all(master.grad is None for _, master in optimizer._masters.pairs())
    optimizer.step()
    snapshot = optimizer.state_dict()
    saved = [t for group in snapshot["fp32_from_fp16"] for t in group]
    inside = [s["master"] for s in snapshot["optimizer_state_dict"]["state"].values()
              if "master" in s]  # fmt: skip
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in inside], "in a file once"


@pytest.mark.parametrize("arguments", [{"dynamic_loss_scale": True}, {"static_loss_scale": 8.0}])
def test_the_folded_path_reads_gradients_once_clipping_included(
    device: str, arguments: dict[str, Any]
) -> None:
    model = Mixed(torch.bfloat16).to(device)
    optimizer = wrap(amp.optim.SGD(model.parameters(), lr=0.1), **arguments)
    optimizer.loss_scale = 8.0
    train_step(model, optimizer, torch.randn(5, 4, device=device))
    optimizer.zero_grad()
    optimizer.backward(model(torch.randn(5, 4, device=device)).float().sum())
    norm = optimizer.clip_master_grads(0.5)
    for p in model.parameters():
        p.grad.data.mul_(4)  # which no version counter sees
    optimizer.step()
    assert optimizer.optimizer.grad_norm == pytest.approx(float(norm), rel=1e-6)


def test_snapshots_go_from_one_path_to_the_other(device: str) -> None:
    first, second = (Mixed(torch.float16).to(device) for _ in range(2))
    copied = wrap(torch.optim.AdamW(first.parameters(), lr=1e-2), static_loss_scale=8.0)
    for _ in range(3):
        train_step(first, copied, torch.randn(5, 4, device=device))
    second.load_state_dict(first.state_dict())
    inner = amp.optim.AdamW(second.parameters(), lr=1e-2, master="float32")
    folded = wrap(inner, static_loss_scale=8.0)
    folded.load_state_dict(copied.state_dict())
    for a, b in zip(masters_of(folded), masters_of(copied), strict=True):
        assert torch.equal(a, b)
    third = Mixed(torch.float16).to(device)
    again = wrap(amp.optim.AdamW(third.parameters(), lr=1e-2, master="float32"))
    again.load_state_dict(folded.state_dict())
    assert raw_bytes(again.state_dict()) == raw_bytes(folded.state_dict())
