"""A loop that was interrupted between unscale_ and step, and begins again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_mp as amp

KINDS = [torch.optim.SGD, amp.optim.SGD]
AGAIN = r"unscale_ had divided.*scaler\.update\(\) and optimizer\.zero_grad\(\)"


def weight_of(device: str) -> nn.Parameter:
    return nn.Parameter(torch.ones(4, device=device))


@pytest.mark.parametrize("clears", [False, True], ids=["as they were left", "cleared"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_begins_again_after_unscale_is_refused_and_then_trains(
    device: str, kind: Any, clears: bool
) -> None:
    weight = weight_of(device)
    optimizer, scaler = kind([weight], lr=1.0), amp.GradScaler(device, init_scale=2.0**10)

    def iteration(interrupted: bool) -> None:
        if clears:
            optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        if interrupted:
            scaler.unscale_(optimizer)
            raise KeyboardInterrupt
        scaler.step(optimizer)
        scaler.update()

    with pytest.raises(KeyboardInterrupt):
        iteration(interrupted=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=AGAIN):
            iteration(interrupted=False)
    assert weight.tolist() == [1.0] * 4
    scaler.update()
    optimizer.zero_grad()
    for step in range(2):
        iteration(interrupted=False)
        optimizer.zero_grad()
        assert weight.tolist() == [-step] * 4
    assert not weight._post_accumulate_grad_hooks  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
def test_two_networks_may_unscale_and_step_in_any_order(device: str, kind: Any) -> None:
    """A GAN's second loss is scaled after its first optimizer's gradients were unscaled."""
    a, b = weight_of(device), weight_of(device)
    first, second = kind([a], lr=1.0), kind([b], lr=1.0)
    scaler = amp.GradScaler(device, init_scale=2.0**10)

    def backward(weight: Tensor) -> None:
        scaler.scale(weight.sum()).backward()

    for _ in range(3):
        first.zero_grad()
        second.zero_grad()
        backward(a)
        scaler.unscale_(first)
        backward(b)
        scaler.unscale_(second)
        for weight in (a, b):
            nn.utils.clip_grad_norm_([weight], 1.0)
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    assert torch.allclose(a, torch.full_like(a, -0.5))
    assert torch.equal(a, b)
