"""LARC in whole scripts: copies after a scheduler, checkpoints, float16 gradients under a scale."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import raw_bytes, through_a_file
from torch import Tensor, nn

import amp_mp as amp

INNER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "torch AdamW": lambda params: torch.optim.AdamW(params, 0.1),
    "amp SGD": lambda params: amp.optim.SGD(params, 0.1, momentum=0.9),
    "amp AdamW": lambda params: amp.optim.AdamW(params, 0.1),
}


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
@pytest.mark.parametrize("inner", INNER)
def test_a_copy_made_after_a_scheduler_steps_its_own_parameters(inner: str, copied: Any) -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    larc = amp.apex.parallel.LARC(INNER[inner]([weight]), 0.05, clip=False)
    calls: list[int] = []
    larc.register_step_post_hook(lambda *_: calls.append(1))
    torch.optim.lr_scheduler.StepLR(larc, 5)
    weight.grad = torch.ones(4, 3)
    larc.step()
    other = copied(larc)
    assert (other.trust_coefficient, other.clip) == (0.05, False)
    calls.clear()
    mine = other.param_groups[0]["params"][0]
    mine.grad = torch.full((4, 3), 2.0)
    original, before = raw_bytes([weight, larc.state_dict()]), raw_bytes(mine)
    other.step()
    assert raw_bytes([weight, larc.state_dict()]) == original
    assert raw_bytes(mine) != before
    assert calls == []  # as a copy of torch's optimizers, it has no hooks
    weight.grad = torch.full((4, 3), 2.0)
    larc.step()
    assert raw_bytes([weight, larc.state_dict()]) == raw_bytes([mine, other.state_dict()])


@pytest.mark.parametrize("inner", INNER)
def test_a_checkpoint_is_loaded_into_larc(tmp_path: Path, inner: str) -> None:
    def made(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        net: nn.Module = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
        if inner.startswith("amp"):
            amp.prepare(net, torch.bfloat16)
        return net, amp.apex.parallel.LARC(INNER[inner](net.parameters()))

    def train(net: nn.Module, larc: Any) -> None:
        x = torch.ones(2, 5, dtype=next(net.parameters()).dtype)
        net(x).float().square().mean().backward()
        larc.step()
        larc.zero_grad()

    net, larc = made(1)
    train(net, larc)
    amp.checkpoint.save(tmp_path / "step", net, larc)
    train(net, larc)
    again, other = made(2)
    amp.checkpoint.load(tmp_path / "step", again, other)
    train(again, other)
    assert raw_bytes([net.state_dict(), larc.state_dict()]) == raw_bytes(
        [again.state_dict(), other.state_dict()]
    )


def wanted_update(weight: Tensor, grad: Tensor, clip: bool, lr: float, decay: float) -> Tensor:
    """Apex's formula in float64, of true gradients."""
    w, g = weight.double(), grad.double()
    ratio = 0.02 * w.norm() / (g.norm() + decay * w.norm() + 1e-8)
    ratio = min(ratio / lr, torch.tensor(1.0)) if clip else ratio
    return -lr * (g + decay * w) * ratio


def scaled_by(name: str, device: str, larc: Any, weight: nn.Parameter, grad: Tensor) -> None:
    """One step on float16 gradients that carry a scale of 2^16."""
    scale = 2.0**16
    if name == "handle.scale_loss":
        policy = amp.scaling.Static(scale)
        handle = amp.init(dtype=torch.float16, device_type="cpu", loss_scale=policy)
        try:
            with handle.scale_loss((weight.float() * grad).sum(), larc) as loss:
                loss.backward()
            larc.step()
        finally:
            handle._deactivate()
        return
    kind = amp.GradScaler if name == "amp.GradScaler" else torch.amp.GradScaler
    scaler = kind(device, init_scale=scale)
    scaler.scale((weight.float() * grad).sum()).backward()
    scaler.step(larc)
    scaler.update()


SCALERS = ["amp.GradScaler", "torch.amp.GradScaler", "handle.scale_loss"]


@pytest.mark.parametrize("size", [2e-8, 1e-4])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("decay", [0.0, 1e-9])
@pytest.mark.parametrize("scaler", SCALERS)
def test_float16_gradients_are_unscaled_in_float32(
    scaler: str, decay: float, clip: bool, size: float
) -> None:
    """At 2e-8 a true gradient is below the smallest float16."""
    torch.manual_seed(1)
    master, grad = torch.randn(32, 16) * 1e-4, torch.randn(32, 16) * size
    weight = nn.Parameter(master.half())
    inner = amp.optim.SGD([weight], 0.1, weight_decay=decay, master="float32")
    larc = amp.apex.parallel.LARC(inner, clip=clip)
    inner.init_state()
    before = inner.state[weight]["master"].clone()
    # float16 gradients are what the product's backward rounds.
    given = (grad * 2.0**16).half().float() / 2.0**16
    scaled_by(scaler, "cpu", larc, weight, given)
    found = (inner.state[weight]["master"] - before).double()
    want = wanted_update(before, given, clip, 0.1, decay)
    # The masters are about 1e-4: their float32 roundings are up to 2^-24 * 4e-4 each.
    error, bound = (found - want).abs(), want.abs() * 2.0**-10 + 2.0**-24 * 5e-4
    assert (error <= bound).all()
    if size == 1e-4 or not clip:
        cosine = torch.nn.functional.cosine_similarity(found.flatten(), want.flatten(), dim=0)
        assert cosine > 0.99999


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("scaler", SCALERS)
def test_an_overflow_changes_no_byte(scaler: str, inner: str) -> None:
    weight = nn.Parameter(torch.ones(4, 3, dtype=torch.float16))
    larc = amp.apex.parallel.LARC(INNER[inner]([weight]))
    scaled_by(scaler, "cpu", larc, weight, torch.full((4, 3), 0.25))
    larc.zero_grad()
    before = raw_bytes([weight, larc.state_dict()])
    scaled_by(scaler, "cpu", larc, weight, torch.full((4, 3), 64.0))  # times 2^16 is inf
    assert raw_bytes([weight, larc.state_dict()]) == before
    larc.zero_grad()
    scaled_by(scaler, "cpu", larc, weight, torch.full((4, 3), 0.25))
    assert raw_bytes([weight, larc.state_dict()]) != before
