"""Skipped steps are warned of: the first one, and many in a row, naming the parameters."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import NO_GRADIENT, raw_bytes, warns
from rules import KINDS
from torch import nn

import amp_mp as amp

MEASURE = ("LARS", "LAMB", "NovoGrad")  # norms, with or without the check


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


def warned(
    device: str, step: Callable[[bool], None], bad: list[bool], what: str = "in a row"
) -> list[str]:
    """Which warnings with `what` in them steps with bad and good gradients give."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for each in bad:
            step(each)
            if device == "cuda":  # the report of a step is seen at the next one
                torch.cuda.synchronize()
    return [str(w.message) for w in found if what in str(w.message)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", [*KINDS, "Muon"])
def test_every_optimizer_skips_by_itself_and_says_so_once(
    device: str, name: str, dtype: torch.dtype
) -> None:
    model = Net().to(device, dtype)
    if name == "Muon":
        optimizer: Any = amp.optim.Muon(model, lr=0.1)
    else:
        numbers = {**KINDS[name], "amsgrad": False} if name == "AdamW" else KINDS[name]
        optimizer = getattr(amp.optim, name)(model.named_parameters(), lr=0.1, **numbers)

    def step(bad: bool) -> None:
        bad_gradients(model, bad, float("inf") if dtype == torch.float16 else float("nan"))
        before = raw_bytes([[*model.parameters()], optimizer.state_dict()["state"]])
        optimizer.step()
        after = raw_bytes([[*model.parameters()], optimizer.state_dict()["state"]])
        assert (before == after) == bad

    found = warned(device, step, [False, True, True, False, True, False], "has skipped step")
    (message,) = found
    assert message.startswith(f"amp_mp: {name} has skipped step 2: gradients are inf or NaN")
    assert ("second.weight" in message) == (device == "cpu")  # naming it would wait for a GPU
    assert "first.weight" not in message
    assert ("check_overflow=False" in message) != (name in MEASURE)
    assert optimizer.last_report(wait=True).overflows == 3


@pytest.mark.parametrize("name", [name for name in KINDS if name not in MEASURE])
def test_without_the_check_steps_go_on_as_torchs_do(device: str, name: str) -> None:
    model = Net().to(device)
    numbers = {**KINDS[name], "amsgrad": False} if name == "AdamW" else KINDS[name]
    kind = getattr(amp.optim, name)
    optimizer = kind(model.parameters(), lr=0.1, check_overflow=False, **numbers)

    def step(bad: bool) -> None:
        bad_gradients(model, bad)
        optimizer.step()

    assert warned(device, step, [False, True, False], "skipped") == []
    assert model.second.weight.isnan().sum() == 1
    assert optimizer.last_report().grad_norm is None


@pytest.mark.parametrize("wrapper", ["LARC", "FP16_Optimizer", "scale_loss", "a closure"])
def test_the_check_is_the_inner_optimizers(device: str, wrapper: str) -> None:
    """Around it wrappers without a dynamic loss scale look for nothing themselves."""
    model = Net().to(device)
    inner: Any = amp.optim.SGD(model.parameters(), lr=0.1)
    outer: Any = inner
    if wrapper == "LARC":
        outer = amp.apex.parallel.LARC(inner)
    elif wrapper == "FP16_Optimizer":
        outer = amp.FP16_Optimizer(inner, verbose=False)
    handle = amp.init(verbose=False, loss_scale=1.0) if wrapper == "scale_loss" else None

    def backward(bad: bool) -> torch.Tensor:
        outer.zero_grad()
        loss = model(torch.ones(1, 32, device=device)).float().sum() * (float("nan") if bad else 1)
        if wrapper == "FP16_Optimizer":
            outer.backward(loss)
        elif handle is not None:
            with handle.scale_loss(loss, inner) as scaled:
                scaled.backward()
        else:
            loss.backward()
        return loss

    def step(bad: bool) -> None:
        before = raw_bytes([*model.parameters()])
        if wrapper == "a closure":
            outer.step(lambda: backward(bad))
        else:
            backward(bad)
            outer.step()
        assert (raw_bytes([*model.parameters()]) == before) == bad

    try:
        assert len(warned(device, step, [False, True, True, False], "has skipped step")) == 1
    finally:
        if handle is not None:
            handle.deactivate()


@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "FusedAdagrad"])
def test_apexs_names_step_with_what_they_are_given(device: str, name: str) -> None:
    """Apex's FusedAdam and the like look at no gradient."""
    model = Net().to(device)
    optimizer = getattr(amp.apex.optimizers, name)(model.parameters(), lr=0.1)
    assert optimizer.check_overflow is False

    def step(bad: bool) -> None:
        bad_gradients(model, bad)
        optimizer.step()

    assert warned(device, step, [True], "skipped") == []
    assert model.second.weight.isnan().any()


def test_a_copy_and_a_file_keep_the_choice(device: str) -> None:
    model = Net().to(device)
    for options, checks, checks_each in (
        ({}, True, False),
        ({"check_overflow": None}, True, False),  # as a config's null
        ({"check_overflow": True}, True, True),
        ({"check_overflow": False}, False, False),
    ):
        made = amp.optim.AdamW(model.parameters(), **options)
        for each in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert each.check_overflow is checks
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                params = [p for group in each.param_groups for p in group["params"]]
                before = raw_bytes(params)
                params[0].grad = torch.full_like(params[0], float("nan"))
                with each.attach(nn.ParameterList(params)):
                    (params[0] * float("nan")).sum().backward()  # steps this one alone
                    each.step()
            assert (raw_bytes(params) == before) == checks_each
            with torch.no_grad():
                params[0].fill_(1)


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
