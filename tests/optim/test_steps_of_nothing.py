"""Steps that must change nothing: of a rate of 0, skipped ones, and those of impossible scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rules import RULES, is_allowed
from tiers import paired
from torch import Tensor, nn

import amp_mp as amp

PRESETS = ("float32", "exact", "lean", "tiny", "micro", "nano", "masterless")
DTYPES = (torch.bfloat16, torch.float16)
LIMIT = 2.0**-128  # the reciprocal of less is infinite in float32


def prepared(device: str, dtype: torch.dtype) -> nn.Module:
    """With all numbers between two neighbours of a weight, and half way between many two."""
    model = nn.Linear(512, 512, device=device)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.weight.copy_(torch.randn(512, 512, generator=generator) / 16)
        between = torch.arange(512 * 128, dtype=torch.int32) + 0x3E800000
        model.weight[:128] = between.view(128, 512).view(torch.float32).to(device)
        ties = torch.arange(512 * 64, dtype=torch.int32) * 0x10000 % 0x1000000 + 0x3E808000
        model.weight[128:192] = ties.view(64, 512).view(torch.float32).to(device)
        model.weight[192:320] *= -1
        model.weight[192:320] = -model.weight[:128]
    return amp.prepare(model, dtype)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def rate_zero(model: nn.Module, make: Callable[..., Any]) -> None:
    optimizer = make(model.parameters(), lr=0.0)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    for _ in range(3):
        optimizer.step()


def skipped(model: nn.Module, make: Callable[..., Any]) -> None:
    optimizer = make(model.parameters(), check_overflow=True)
    optimizer.init_state()
    for param in model.parameters():
        param.grad = torch.full_like(param, torch.inf)
    optimizer.step()
    assert optimizer.step_was_skipped


def made_state(model: nn.Module, make: Callable[..., Any]) -> None:
    make(model.parameters()).init_state()


def other_master(model: nn.Module, make: Callable[..., Any]) -> None:
    """Masters of float32 that become those of the preset."""
    optimizer = make(model.parameters(), lr=0.0)
    wanted = optimizer.param_groups[0]["master"]
    optimizer.param_groups[0]["master"] = "float32"
    optimizer.init_state()
    optimizer.param_groups[0]["master"] = wanted
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()


@pytest.mark.parametrize(
    ("memory", "dtype", "rule", "act"),
    paired(
        PRESETS,
        DTYPES,
        ["adamw", "sgd", "lion", "lamb"],
        [rate_zero, skipped, made_state, other_master],
        allowed=is_allowed,
    ),
)
def test_weights_of_prepare_stay(
    device: str, memory: str, dtype: torch.dtype, rule: str, act: Callable[..., None]
) -> None:
    model = prepared(device, dtype)
    before = weights(model)
    kind, options = RULES[rule]
    given = {**options, "memory": memory, "weight_decay": 0.0}
    act(model, lambda params, **more: kind(params, **{**given, **more}))
    assert same(before, weights(model))


@pytest.mark.parametrize(("memory", "bits"), [("exact", 24), ("lean", 16), ("nano", 12)])
def test_the_masters_are_the_nearest_that_keep_the_weights(
    device: str, memory: str, bits: int
) -> None:
    """Half way between two weights the nearest master that rounds to prepare's is a step away."""
    source = prepared(device, torch.bfloat16)
    wanted = amp.float32_state_dict(source, amp.optim.SGD(source.parameters(), lr=0.0))
    optimizer = amp.optim.AdamW(source.parameters(), memory=memory)
    optimizer.init_state()
    found = amp.float32_state_dict(source, optimizer)
    for name, value in wanted.items():
        error = (found[name].double() - value.double()).abs()
        assert (error <= value.double().abs() * 2.0 ** (1 - bits)).all(), name


def test_where_nothing_is_half_way_exact_is_exact(device: str) -> None:
    model = nn.Linear(512, 64, device=device)
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    for value in values.values():  # odd numbers are no ties
        value.view(torch.int32).bitwise_or_(1)
    model.load_state_dict(values)
    amp.prepare(model, torch.bfloat16)
    optimizer = amp.optim.AdamW(model.parameters(), memory="exact")
    optimizer.init_state()
    found = amp.float32_state_dict(model, optimizer)
    assert all(torch.equal(found[name], value) for name, value in values.items())


def step_of(scale: float, memory: str, handing: str) -> tuple[bool, Any]:
    """One step on gradients that are said to carry the scale."""
    model = nn.Linear(64, 8).to(torch.bfloat16)
    optimizer = amp.optim.AdamW(model.parameters(), memory=memory)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = weights(model) + [v.clone() for s in optimizer.state.values() for v in s.values()]
    if handing == "update":
        scaler = amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        scaler.update(scale)
        scaler.step(optimizer)
    else:
        kind = torch.amp.GradScaler if handing == "torch" else amp.GradScaler
        scaler = kind("cpu", init_scale=2.0**-100)
        scaler.scale(torch.ones(()))
        scaler._scale.fill_(scale)
        if handing == "unscale_":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    after = weights(model) + [v.clone() for s in optimizer.state.values() for v in s.values()]
    return same(before, after), optimizer


@pytest.mark.parametrize(
    ("scale", "handing"),
    [
        (s, h)
        for s in (1e-40, 0.0, LIMIT, float("nan"))
        for h in ("step", "unscale_", "update", "torch")
    ],
)
@pytest.mark.parametrize("memory", ["float32", "exact", "lean"])
def test_a_scale_without_a_reciprocal_skips_the_step(
    scale: float, handing: str, memory: str
) -> None:
    unchanged, optimizer = step_of(scale, memory, handing)
    assert unchanged
    assert optimizer.step_was_skipped


@pytest.mark.parametrize("memory", ["float32", "lean"])
def test_the_smallest_scale_that_has_one_steps(memory: str) -> None:
    unchanged, optimizer = step_of(2.0**-127, memory, "step")
    assert not unchanged
    assert all(p.isfinite().all() for group in optimizer.param_groups for p in group["params"])


@pytest.mark.parametrize("bad", [1e-40, 0.0, -1.0, float("nan"), float("inf")])
def test_such_a_first_scale_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="init_scale must be"):
        amp.GradScaler("cpu", init_scale=bad)
    amp.GradScaler("cpu", init_scale=bad, enabled=False)
