"""hyperball=True of AdamW and Muon: the paper's formula, norms that stay, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import reference
import torch
from helpers import DTYPES, array, assert_same, on, random, raw_bytes
from rules import MASTERED, STORAGES, Expected, found_master, is_allowed
from tiers import paired
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

import amp_mp as amp

LR = 0.02
SHAPE = (128, 96)
KINDS: dict[str, tuple[type[amp.optim.FusedOptimizer], dict[str, Any]]] = {
    "adamw": (amp.optim.AdamW, {"betas": (0.9, 0.95)}),
    "muon": (amp.optim.Muon, {}),
    "normuon": (amp.optim.Muon, {"normalize": "rows"}),
}
QUINTIC = (3.4445, -4.7750, 2.0315)  # as in torch.optim.Muon


def matrix(device: str, dtype: torch.dtype, seed: int = 0, spread: float = 0.02) -> nn.Parameter:
    return nn.Parameter(on(device, random(math.prod(SHAPE), seed, spread), dtype).view(SHAPE))


def made(kind: str, params: Any, **more: Any) -> amp.optim.FusedOptimizer:
    optimizer, numbers = KINDS[kind]
    return optimizer(params, **{"lr": LR, "hyperball": True, **numbers, **more})


def gradient(param: Tensor, step: int) -> Tensor:
    values = random(param.numel(), 1000 + step, 10.0 ** (step % 5 - 3))
    return torch.from_numpy(values).to(param.device, param.dtype).view(param.shape)


def norm_of(optimizer: amp.optim.FusedOptimizer, param: Tensor) -> float:
    with optimizer.masters(param) as master:
        return master.double().norm().item()


@pytest.mark.parametrize(("weight", "storage"), paired(DTYPES, [*STORAGES], allowed=is_allowed))
def test_adamw_has_the_bits_of_the_reference(device: str, weight: str, storage: str) -> None:
    stored = STORAGES[storage]
    param = matrix(device, DTYPES[weight])
    optimizer = amp.optim.AdamW(
        [param], lr=0.05, betas=(0.9, 0.999), weight_decay=0.1, hyperball=True, **stored
    )
    want = Expected("hyperball", param, states=("exp_avg", "exp_avg_sq"), **stored)
    for step in range(4):
        param.grad = gradient(param, step)
        want.step(array(param.grad), np.float32(1))
        optimizer.step()
    assert_same(array(param).reshape(-1), want.visible, "weight")
    state = optimizer.state[param]
    assert_same(found_master(state, param, want.formats["master"]), want.master, "master")
    assert state["radius"].item() == pytest.approx(want.clock.radius, rel=1e-14)


@pytest.mark.parametrize("shape", [(64, 48), (48, 64), (2, 32, 32)])
def test_muon_has_the_bits_of_torchs_update_on_a_sphere(
    device: str, shape: tuple[int, ...]
) -> None:
    param = nn.Parameter(on(device, random(math.prod(shape), 0, 0.1), torch.float32).view(shape))
    optimizer = made("muon", [param], weight_decay=0.3)
    w, momentum = array(param).reshape(-1), torch.zeros(shape, device=device)
    clock = reference.Clock()
    for step in range(5):
        param.grad = gradient(param, step)
        momentum.lerp_(param.grad, 0.05)
        direction = param.grad.lerp(momentum, 0.95)
        parts = direction.unbind() if len(shape) == 3 else [direction]
        update = torch.stack([_zeropower_via_newtonschulz(d, QUINTIC, 5, 1e-7) for d in parts])
        w = reference.hyperball(array(update.float()).reshape(-1), w, clock, LR)
        optimizer.step()
        assert_same(array(param).reshape(-1), w, f"step {step}")


def test_adamw_follows_the_papers_two_lines_in_float64(device: str) -> None:
    """Float32 rounds a weight and its update once a step: 60 steps within 60 * 4 * 2^-24."""
    param = matrix(device, torch.float32)
    optimizer = made("adamw", [param], eps=1e-8)
    w = array(param).astype(np.float64)
    m, v, radius = np.zeros_like(w), np.zeros_like(w), np.linalg.norm(w)
    for step in range(1, 61):
        param.grad = gradient(param, step)
        g = array(param.grad).astype(np.float64)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        u = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)
        w = w - LR * radius * u / np.linalg.norm(u)
        w = radius * w / np.linalg.norm(w)
        optimizer.step()
    assert np.abs(array(param) - w).max() <= 60 * 4 * 2**-24 * np.abs(w).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "memory"),
    [
        *paired(["adamw", "muon"], DTYPES, MASTERED, allowed=is_allowed),
        ("normuon", "bfloat16", "lean"),
    ],
)
def test_norms_stay_for_a_thousand_steps(device: str, kind: str, dtype: str, memory: str) -> None:
    """Masters of 16 bits round 12,288 elements by 2^-17 at most each: their norm by about 2^-23.

    Those of 12 round by 2^-11 at most, with a deviation of 2^-12 or less: the norm by 2^-19.
    """
    param = matrix(device, DTYPES[dtype])
    optimizer = made(kind, [param], memory=memory)
    before, furthest = norm_of(optimizer, param), 0.0
    for step in range(1000):
        param.grad = gradient(param, step % 20)
        optimizer.step()
        if step % 50 == 49:
            furthest = max(furthest, abs(norm_of(optimizer, param) / before - 1))
    assert furthest < (2**-16 if memory == "nano" else 2**-20)
    turned = np.vdot(array(matrix(device, DTYPES[dtype])), array(param)) / before**2
    assert turned < 0.99, "the weights have not moved"


def test_projected_bfloat16_weights_would_drift(device: str) -> None:
    """What hyperball without a master does: the bound above is one that it can miss."""
    param = matrix(device, torch.bfloat16)
    optimizer = made("adamw", [param], master="none")
    before = param.double().norm().item()
    for step in range(50):
        param.grad = gradient(param, step)
        optimizer.step()
    assert abs(param.double().norm().item() / before - 1) > 2**-20


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_learning_rate_is_an_angle(device: str, kind: str) -> None:
    """A first step across the weights turns them by atan(lr), whatever the gradient's size."""
    for size in (1e-3, 1e3):
        param = nn.Parameter(torch.eye(8, device=device) * 0.5)
        optimizer = made(kind, [param], lr=0.1)
        before = param.detach().clone()
        # Its signs, and what Muon makes of it, have no diagonal either.
        param.grad = torch.eye(8, device=device).roll(1, 0) * size
        optimizer.step()
        cosine = torch.nn.functional.cosine_similarity(before.flatten(), param.flatten(), 0)
        assert math.acos(cosine.item()) == pytest.approx(math.atan(0.1), rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_skipped_step_leaves_every_byte(device: str, kind: str, bad: float) -> None:
    param = matrix(device, torch.bfloat16)
    optimizer = made(kind, [param], memory="lean")
    for step in range(2):
        param.grad = gradient(param, step)
        optimizer.step()
    before = raw_bytes([param, optimizer.state_dict()])
    param.grad[3, 5] = bad
    optimizer.step()
    assert optimizer.step_was_skipped
    assert raw_bytes([param, optimizer.state_dict()]) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_bits(device: str, kind: str) -> None:
    through = matrix(device, torch.bfloat16)
    one = made(kind, [through], memory="lean", max_grad_norm=1.0)
    for step in range(3):
        through.grad = gradient(through, step)
        one.step()
    again = nn.Parameter(through.detach().clone())
    other = made(kind, [again], memory="lean", max_grad_norm=1.0)
    other.load_state_dict(one.state_dict())
    for step in range(3, 6):
        for param, optimizer in ((through, one), (again, other)):
            param.grad = gradient(param, step)
            optimizer.step()
    assert raw_bytes([through, one.state_dict()]) == raw_bytes([again, other.state_dict()])


def test_it_begins_where_it_is_switched_on(device: str) -> None:
    """From a run of plain AdamW, and in the middle of one: the norm is that of then."""
    param = matrix(device, torch.float32)
    plain = amp.optim.AdamW([param], lr=0.01, weight_decay=0.0)
    for step in range(3):
        param.grad = gradient(param, step)
        plain.step()
    then = param.double().norm().item()
    loaded = nn.Parameter(param.detach().clone())
    other = made("adamw", [loaded])
    other.load_state_dict(
        {**plain.state_dict(), "param_groups": other.state_dict()["param_groups"]}
    )
    plain.param_groups[0].update(hyperball=True)
    for each, optimizer in ((param, plain), (loaded, other)):
        for step in range(3):
            each.grad = gradient(each, 10 + step)
            optimizer.step()
        assert each.double().norm().item() == pytest.approx(then, rel=2**-20)
        assert optimizer.state[each]["radius"].item() == pytest.approx(then, rel=2**-24)


def test_groups_and_a_models_matrices(device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 4))
    model = amp.prepare(model.to(device), torch.bfloat16)
    named = dict(model.named_parameters())
    matrices = [p for p in named.values() if p.dim() > 1]
    others = [p for p in named.values() if p.dim() < 2]
    groups = [
        {"params": matrices},
        {"params": others, "hyperball": False, "weight_decay": 0.0, "lr": 1e-3},
    ]
    for optimizer in (
        amp.optim.AdamW(groups, lr=LR, hyperball=True),
        amp.optim.Muon(model, lr=LR, hyperball=True, others={"lr": 1e-3}),
    ):
        kept = [p for g in optimizer.param_groups if g.get("hyperball") for p in g["params"]]
        assert kept
        assert all(p.dim() > 1 for p in kept)
        before = {n: norm_of(optimizer, p) for n, p in named.items()}
        for step in range(4):
            for param in named.values():
                param.grad = gradient(param, step)
            optimizer.step()
        for name, param in named.items():
            same = abs(norm_of(optimizer, param) - before[name]) < 2**-18 * before[name]
            assert same == any(param is p for p in kept), name


def test_release_steps_have_the_bits(device: str) -> None:
    def trained(release: bool) -> bytes:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
        model.to(device)
        optimizer = made("adamw", model.parameters())
        if release:
            optimizer.attach(model)
        for step in range(3):
            x = torch.from_numpy(random(64, step)).view(2, 32).to(device)
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return raw_bytes(model.state_dict())

    assert trained(True) == trained(False)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_what_has_no_norm_to_keep_is_refused(device: str, kind: str) -> None:
    zeros = nn.Parameter(torch.zeros(4, 4, device=device))
    with pytest.raises(ValueError, match=r"hyperball=True, which keeps norms") as told:
        made(kind, [("lora_B", zeros)])
    assert "'lora_B'" in str(told.value)
    assert "would stay 0" in str(told.value)
    made(kind, [nn.Parameter(torch.zeros(0, 4, device=device))])
    vector = nn.Parameter(torch.ones(4, device=device))
    with pytest.raises(ValueError, match="no matrix"):
        made(kind, [vector])
    frozen = nn.Parameter(torch.zeros(4, 4, device=device), requires_grad=False)
    made(kind, [frozen])
    amp.optim.SGD([{"params": [vector], "hyperball": True}], lr=0.1)  # a script's own entry
    optimizer = amp.optim.AdamW([vector])
    optimizer.param_groups[0]["hyperball"] = True
    vector.grad = torch.ones_like(vector)
    before = raw_bytes(vector)
    with pytest.raises(ValueError, match="is no matrix with hyperball=True"):
        optimizer.step()
    assert raw_bytes(vector) == before


@pytest.mark.parametrize("other", ["amsgrad", "cautious"])
def test_options_that_do_not_go_with_it(other: str) -> None:
    more: dict[str, Any] = {other: True}
    with pytest.raises(ValueError, match=f"hyperball goes without {other}"):
        amp.optim.AdamW([nn.Parameter(torch.ones(2, 2))], hyperball=True, **more)
