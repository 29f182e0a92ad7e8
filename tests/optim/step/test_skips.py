"""Training that stands still because every step is skipped: one warning, naming the parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
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


def warned(run: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in found if "in a row" in str(w.message)]


def finish(device: str) -> None:
    if device == "cuda":  # the report of a step is seen at the next one
        torch.cuda.synchronize()


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

    def steps(count: int, bad: bool) -> Callable[[], None]:
        def run() -> None:
            for _ in range(count):
                bad_gradients(model, bad)
                optimizer.step()
                finish(device)

        return run

    assert warned(steps(3, False)) == []
    assert warned(steps(24, True)) == []
    (message,) = warned(steps(2, True))
    assert message.startswith("amp_mp: AdamW has skipped 25 steps in a row, since step 4: ")
    assert "second.weight" in message
    assert "first.weight" not in message
    assert "second.bias" not in message
    assert warned(steps(60, True)) == []  # once per streak
    assert warned(steps(1, False)) == []
    assert warned(steps(24, True)) == []
    assert len(warned(steps(2, True))) == 1


def test_a_parameter_without_a_name_is_given_by_its_place(device: str) -> None:
    model = Net().to(device)
    optimizer = amp.optim.SGD(model.parameters(), lr=0.1, check_overflow=True)

    def run() -> None:
        for _ in range(26):
            bad_gradients(model, True)
            optimizer.step()
            finish(device)

    (message,) = warned(run)
    assert "parameter 2 of group 0" in message


def test_rare_overflows_are_no_streak(device: str) -> None:
    model = Net().to(device)
    optimizer = amp.optim.SGD(model.parameters(), lr=0.1, max_grad_norm=1.0)

    def run() -> None:
        for i in range(100):
            bad_gradients(model, i % 25 != 0)
            optimizer.step()
            finish(device)

    assert warned(run) == []


def test_released_gradients_are_named_too(device: str) -> None:
    model = Net().to(device)
    optimizer = amp.optim.AdamW(model.named_parameters(), lr=0.1, check_overflow=True)
    optimizer.attach(model, release=True)

    def run() -> None:
        for _ in range(26):
            loss = model(torch.ones(1, 32, device=device)).sum() * float("nan")
            loss.backward()
            optimizer.step()
            finish(device)

    (message,) = warned(run)
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

    def steps(count: int, bad: bool) -> Callable[[], None]:
        def run() -> None:
            for _ in range(count):
                bad_gradients(model, bad)
                if unscales:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                finish(device)

        return run

    assert warned(steps(2, False)) == []
    assert warned(steps(24, True)) == []
    (message,) = warned(steps(2, True))
    assert "has skipped 25 steps in a row, since step 3" in message
    assert "parameter 2 of group 0" in message
    assert warned(steps(30, True)) == []


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
        optimizer.attach(model, release=True, scaler=scaler)
    else:
        optimizer = SCALED[name](model.parameters())
    x = torch.ones(4, 32, device=device)
    for _ in range(2):
        loss = scaler.scale(model(x).square().mean())  # and the backward is forgotten
        if unscales:
            scaler.unscale_(optimizer)
        with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
            scaler.step(optimizer)
        scaler._per_optimizer_states.clear()
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**16
