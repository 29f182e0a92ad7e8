"""Reports on overflows: which gradients, since when, and what to try."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import DTYPES
from torch import Tensor, nn

from amp_mp import diagnose
from amp_mp.diagnose import OverflowTracker
from amp_mp.scaling import Backoff


def gradients(device: str, **values: Any) -> dict[str, Tensor]:
    params = {}
    for name, value in values.items():
        grad = None if value is None else torch.tensor(value, device=device)
        params[name] = nn.Parameter(torch.zeros(1 if grad is None else grad.shape, device=device))
        params[name].grad = grad
    return params


def test_overflow_is_decided_element_by_element(device: str) -> None:
    big = 3e38  # its square and its sum with itself are inf; it is not
    params = gradients(device, fine=[big, big], none=None, bad=[1.0, math.inf, -math.inf, math.nan])
    report = diagnose.diagnose_overflow(params, 1024.0)
    assert list(report) == [("bad", (4,), 4, 2, 1, None)]
    assert not diagnose.diagnose_overflow(gradients(device, a=[big, big], b=None))
    assert not diagnose.diagnose_overflow({})
    assert diagnose.diagnose_overflow(iter(params.items())) == report


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_with_every_kind_of_gradient(device: str, dtype: str) -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 2)).to(device)
    model[1].to(DTYPES[dtype])
    model[1](model[0](torch.tensor([1, 1], device=device)).to(DTYPES[dtype])).sum().backward()
    assert str(diagnose.diagnose_overflow(model)) == "every gradient is finite"
    model[0].weight.grad._values()[0, 0] = math.nan
    model[1].bias.grad[1] = math.inf
    report = diagnose.diagnose_overflow(model)
    assert [(row.name, row.infs, row.nans) for row in report] == [
        ("0.weight", 0, 1),
        ("1.bias", 1, 0),
    ]
    assert report[0].shape == (5, 2)


@pytest.mark.parametrize(
    ("value", "scale", "advice"),
    [
        (math.nan, 1024.0, "no inf: look for the NaN in the forward pass or the data, near head"),
        (math.inf, 1024.0, "exceed the format at loss scale 2^10: lower the scale"),
        (math.nan, None, "python -m amp_mp.diagnose` names the first module whose output is not"),
        (math.inf, 2.0**-9, "inf also at loss scale 2^-9: keep the layers around head in float32"),
        (math.inf, None, "without a loss scale to lower: keep the layers around head in float32"),
    ],
)
def test_a_report_says_what_to_try(value: float, scale: float | None, advice: str) -> None:
    report = diagnose.diagnose_overflow(gradients("cpu", head=[[0.0, value]]), scale)
    table = str(report)
    assert advice in table
    assert table.splitlines()[1].split()[:4] == ["head", "(1,", "2)", "2"]


def run(tracker: OverflowTracker, policy: Any, params: dict[str, Tensor], steps: int) -> None:
    for _ in range(steps):
        policy.update(bool(tracker.update()))


def test_a_scale_that_finds_its_place_is_no_incident() -> None:
    """True gradients of 1: the scale falls from 2^24 to 2^15, and then nothing overflows."""
    policy, params = Backoff(), gradients("cpu", a=[1.0])
    tracker = OverflowTracker(params, policy)
    for _ in range(50):
        params["a"].grad = torch.tensor([policy.scale]).half().float()
        policy.update(bool(tracker.update()))
        assert tracker.verdict is None
    assert policy.scale == 2.0**15


def test_a_nan_that_no_scale_cures_is_recognised() -> None:
    policy = Backoff(scale_min=2.0**-60, scale_max=2.0**16)
    params = gradients("cpu", early=[1.0], bad=[1.0], head=[1.0])
    tracker = OverflowTracker(params, policy)
    run(tracker, policy, params, 7)
    params["bad"].grad = torch.tensor([math.nan])
    params["head"].grad = torch.tensor([math.inf])
    run(tracker, policy, params, 3)
    params["head"].grad = torch.tensor([1.0])
    run(tracker, policy, params, 21)
    assert tracker.verdict is None
    run(tracker, policy, params, 1)
    assert tracker.verdict == (
        "No loss scale can cure this: the gradient of bad has been inf or NaN in each of the 25 "
        "steps since step 8, while the scale fell from 2^16 to 2^-8, so look for the NaN or inf in "
        "the forward pass or the data."
    )
    assert tracker.report[0].since == 8
    params["bad"].grad = torch.tensor([1.0])
    run(tracker, policy, params, 1)
    assert tracker.verdict is None


def test_a_scale_stuck_at_its_floor_is_recognised() -> None:
    policy, params = Backoff(init_scale=4.0), gradients("cpu", a=[math.nan])
    tracker = OverflowTracker(params, policy)
    run(tracker, policy, params, 6)
    assert tracker.verdict is None
    run(tracker, policy, params, 1)
    assert "step 1, while the scale fell from 2^2 to 2^0, its floor, so" in str(tracker.verdict)


@pytest.mark.parametrize(
    ("scale", "start", "end"),
    [
        (64.0, "The loss scale is stuck at 2^6: ", "lower it, or make it dynamic."),
        (1.0, "No loss scale can cure this: ", "in the forward pass or the data."),
    ],
)
def test_a_static_scale_that_always_overflows_is_recognised(
    scale: float, start: str, end: str
) -> None:
    tracker = OverflowTracker(gradients("cpu", a=[math.inf]), scale, floor_patience=2)
    tracker.update()
    assert tracker.verdict is None
    tracker.update()
    trouble = "the gradient of a has been inf or NaN in each of the 2 steps since step 1"
    assert str(tracker.verdict).startswith(start + trouble)
    assert str(tracker.verdict).endswith(end)


def test_bad_arguments_of_the_overflow_tools() -> None:
    with pytest.raises(TypeError, match=r"a module or named parameters .* found Parameter"):
        diagnose.diagnose_overflow(nn.Linear(1, 1).parameters())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="patience must be 2 or more, found 1 and 5"):
        OverflowTracker(nn.Linear(1, 1), patience=1)
