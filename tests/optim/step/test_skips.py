"""Training that stands still because every step is skipped: one warning, naming the parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import NO_GRADIENT, warns
from torch import nn

import amp_mp as amp


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def bad_gradients(model: nn.Module, bad: bool, value: float = float("nan")) -> None:
    """A gradient of ones for every parameter, with one NaN in second.weight if `bad`."""
    for name, param in model.named_parameters():
        param.grad = torch.ones_like(param)
        if bad and name == "second.weight":
            param.grad[1, 2] = value


def warned(device: str, step: Callable[[bool], None], bad: list[bool]) -> list[str]:
    """What steps with bad and good gradients warn of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for each in bad:
            step(each)
            if device == "cuda":  # the report of a step is seen at the next one
                torch.cuda.synchronize()
    return [str(w.message) for w in found if "in a row" in str(w.message)]


OPTIONS: dict[str, dict[str, Any]] = {
    "clip": {"max_grad_norm": 1.0},
    "check": {"check_overflow": True},
    "clip exact": {"max_grad_norm": 1.0, "memory": "exact"},
    "check lean": {"check_overflow": True, "memory": "lean"},
    "check tiny": {"check_overflow": True, "memory": "tiny"},
}


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        *((options, dtype) for options in OPTIONS for dtype in (torch.bfloat16, torch.float16)),
        *((options, torch.float32) for options in ("clip", "check")),
    ],
)
def test_25_skipped_steps_in_a_row_are_one_warning_that_names_the_parameter(
    device: str, dtype: torch.dtype, options: str
) -> None:
    model = Net().to(device, dtype)
    named = list(model.named_parameters())
    optimizer = amp.optim.AdamW(named, **OPTIONS[options])

    def step(bad: bool) -> None:
        bad_gradients(model, bad)
        optimizer.step()

    assert warned(device, step, [False] * 3 + [True] * 24) == []
    (message,) = warned(device, step, [True] * 2)
    assert message.startswith("amp_mp: AdamW has skipped 25 steps in a row, since step 4: ")
    assert "second.weight" in message
    assert "first.weight" not in message
    assert "second.bias" not in message
    assert warned(device, step, [True] * 60) == []  # once per streak
    assert warned(device, step, [False] + [True] * 24) == []
    assert len(warned(device, step, [True] * 2)) == 1


def test_released_gradients_are_named_too(device: str) -> None:
    model = Net().to(device)
    optimizer = amp.optim.AdamW(model.named_parameters(), lr=0.1, check_overflow=True)
    optimizer.attach(model)

    def step(bad: bool) -> None:
        loss = model(torch.ones(1, 32, device=device)).sum() * float("nan")
        loss.backward()
        optimizer.step()

    (message,) = warned(device, step, [True] * 26)
    assert "second.weight" in message


SCALED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch AdamW": lambda params: torch.optim.AdamW(params),
    "torch fused AdamW": lambda params: torch.optim.AdamW(params, fused=True),
    "amp AdamW": lambda params: amp.optim.AdamW(params),
    "amp AdamW unscaled": lambda params: amp.optim.AdamW(params, amp_scaling=False),
}


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("name", SCALED)
def test_a_grad_scaler_warns_as_well(device: str, name: str, unscales: bool) -> None:
    model = Net().to(device)
    optimizer = SCALED[name](model.parameters())
    scaler = amp.GradScaler(device)
    scaler.scale(torch.ones((), device=device))

    def step(bad: bool) -> None:
        bad_gradients(model, bad)
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    assert warned(device, step, [False] * 2 + [True] * 24) == []
    (message,) = warned(device, step, [True] * 2)
    assert "has skipped 25 steps in a row, since step 3" in message
    assert "parameter 2 of group 0" in message
    assert warned(device, step, [True] * 30) == []


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_scale_never_reaches_0_and_the_next_finite_steps_are_finite(
    device: str, name: str, bad: float
) -> None:
    """torch's scale is 0 after 166 overflows in a row; then 0 / 0 is written into every weight."""
    model = Net().to(device)
    optimizer = SCALED[name](model.parameters())
    scaler = amp.GradScaler(device)
    x = torch.ones(4, 32, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(220):
            loss = model(x).square().mean() * (bad if i < 200 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() >= 2.0**-126
    assert scaler.get_scale() == 2.0**-126
    assert all(p.isfinite().all() for p in model.parameters())


# torch's own scaler lets its fused optimizers step without gradients; released ones are gone.
WITHOUT_BACKWARD = [
    *((name, unscales) for name in SCALED if "fused" not in name for unscales in (False, True)),
    ("amp release", False),
]


@pytest.mark.parametrize(("name", "unscales"), WITHOUT_BACKWARD)
def test_a_scaled_step_without_a_backward_raises_as_torchs(
    device: str, name: str, unscales: bool
) -> None:
    model = Net().to(device)
    scaler = amp.GradScaler(device)
    if name == "amp release":
        optimizer: Any = amp.optim.AdamW(model.parameters())
        optimizer.attach(model, scaler=scaler)
    else:
        optimizer = SCALED[name](model.parameters())
    x = torch.ones(4, 32, device=device)
    for first in (True, False):
        loss = scaler.scale(model(x).square().mean())  # and the backward is forgotten
        if unscales:
            scaler.unscale_(optimizer)
        with (
            warns(NO_GRADIENT, first and name in ("amp AdamW", "amp release")),
            pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"),
        ):
            scaler.step(optimizer)
        scaler._per_optimizer_states.clear()
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**16
