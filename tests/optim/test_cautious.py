"""Cautious weight decay: weights decay only where they agree in sign with the update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import array, random
from torch import Tensor, nn

import amp_mp as amp

LR, DECAY = 0.01, 0.2


def adamw(m: Tensor, v: Tensor, g: Tensor, step: int) -> Tensor:
    """Adam's update in float64; m and v move in place."""
    m += 0.1 * (g - m)
    v += 0.01 * (g * g - v)
    return m / (1 - 0.9**step) / ((v / (1 - 0.99**step)).sqrt() + 1e-8)


def lion(m: Tensor, _: Tensor, g: Tensor, __: int) -> Tensor:
    """Lion's update in float64."""
    update = (0.9 * m + 0.1 * g).sign()
    m += 0.01 * (g - m)
    return update


@pytest.mark.parametrize(("kind", "rule"), [(amp.optim.AdamW, adamw), (amp.optim.Lion, lion)])
def test_a_step_is_algorithm_1_of_the_paper(device: str, kind: Any, rule: Any) -> None:
    """Chen et al. 2025: x = x - lr (u + decay 1[u x >= 0] x), in float64."""
    param = nn.Parameter(torch.from_numpy(random(1000, 1)).to(device).view(10, 100))
    with torch.no_grad():
        param[0] = 0
    optimizer = kind([param], lr=LR, betas=(0.9, 0.99), weight_decay=DECAY, cautious=True)
    x = param.detach().cpu().double()
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for step in range(1, 6):
        param.grad = torch.from_numpy(random(1000, 10 + step)).to(device).view(10, 100)
        param.grad[1] = 0
        u = rule(m, v, param.grad.cpu().double(), step)
        assert 0 < int((u * x < 0).sum()) < 900
        x = x - LR * (u + DECAY * (u * x >= 0) * x)
        optimizer.step()
        torch.testing.assert_close(param.detach().cpu().double(), x, rtol=0, atol=1e-6 * step)


def test_muon_decays_where_the_orthogonal_update_agrees(device: str) -> None:
    weight, grad = random(64 * 48, 1).reshape(64, 48), random(64 * 48, 2).reshape(64, 48)
    found = {}
    for name, options in {"u": {"weight_decay": 0.0}, "cautious": {"cautious": True}}.items():
        param = nn.Parameter(torch.from_numpy(weight.copy()).to(device))
        param.grad = torch.from_numpy(grad).to(device)
        amp.optim.Muon([param], **{"lr": LR, "weight_decay": DECAY, **options}).step()
        found[name] = param.detach().cpu().double()
    x = torch.from_numpy(weight).double()
    u = x - found["u"]
    wanted = x - u - LR * DECAY * (u * x >= 0) * x
    torch.testing.assert_close(found["cautious"], wanted, rtol=0, atol=4e-6)
    assert (u * x < 0).any()


def test_the_master_has_the_sign(device: str) -> None:
    """Below half of the least bfloat16 the parameter is 0, and its master is not."""
    param = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16, device=device))
    optimizer = amp.optim.Lion([param], lr=LR, weight_decay=50.0, master="float32", cautious=True)
    optimizer.init_state()
    tiny = 2.0**-135  # rounds to 0 in bfloat16
    optimizer.state[param]["master"].copy_(torch.tensor([tiny, -tiny]))
    param.grad = torch.full_like(param, 1.0)
    twin = nn.Parameter(torch.tensor([tiny, -tiny], device=device))
    twin.grad = torch.ones_like(twin)
    other = amp.optim.Lion([twin], lr=LR, weight_decay=50.0, cautious=True)
    optimizer.step()
    other.step()
    assert torch.equal(optimizer.state[param]["master"], twin)


def test_groups_may_differ_and_a_file_without_it_means_no(device: str) -> None:
    first, second = (nn.Parameter(torch.full((4,), -1.0, device=device)) for _ in range(2))
    groups = [{"params": [first], "cautious": True}, {"params": [second]}]
    optimizer = amp.optim.AdamW(groups, lr=LR, weight_decay=DECAY)
    for param in (first, second):
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert array(first) == pytest.approx(-1.0 - LR, rel=1e-6)  # the update moves it away from 0
    assert array(second) == pytest.approx(-1.0 + LR * DECAY - LR, rel=1e-6)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["cautious"]
    optimizer.load_state_dict(state)
    assert [group["cautious"] for group in optimizer.param_groups] == [False, False]


@pytest.mark.parametrize("kind", [amp.optim.NAdam, amp.optim.RAdam])
def test_an_l2_penalty_cannot_be_cautious(kind: Any) -> None:
    params = [nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match="cautious is for decoupled weight decay"):
        kind(params, weight_decay=DECAY, cautious=True)
    kind(params, weight_decay=DECAY, decoupled_weight_decay=True, cautious=True)
    with pytest.raises(TypeError, match="Adam has no argument 'cautious'"):
        amp.optim.Adam(params, cautious=True)
    with pytest.raises(ValueError, match="cautious must be True or False"):
        amp.optim.AdamW(params, cautious="yes")  # type: ignore[arg-type]
