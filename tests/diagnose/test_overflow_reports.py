"""Reports on overflows: which gradients, since when, and what to try."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counting import UP, of, stepped
from helpers import DTYPES
from torch import Tensor, nn

from amp_mp import diagnose
from amp_mp.diagnose import OverflowTracker, UpdateRatios
from amp_mp.diagnose.gradient_watch import GradientReport
from amp_mp.diagnose.updates import UpdateTable
from amp_mp.scaling import Backoff, Static


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


def test_the_picture_of_gradients(tmp_path: Path) -> None:
    weights = of(np.exp2(np.random.default_rng(0).uniform(-35, 0, 1000)))
    report = GradientReport({"a": weights}, {"b": of([1.0])}, 2.0**10, torch.float16)
    figure = diagnose.plot_gradients(report)
    left, right = figure.axes
    shown = f"{weights.at(2.0**10).lost:.2%}"
    assert left.get_title().startswith(f"Weight gradients in float16 at loss scale 2^10\n{shown}")
    assert right.get_title().startswith("Activation gradients in float16")
    assert left.get_xlabel() == "magnitude of the unscaled gradient [log2 |g|]"
    bars = [patch for patch in left.patches if patch.get_width() == 1 and patch.get_height()]
    assert sum(bar.get_height() for bar in bars) == pytest.approx(100)
    zones = {patch.get_label(): patch.get_x() for patch in left.patches if patch.get_label()}
    assert zones["subnormal: loses precision"] == -35  # -25 without scaling
    assert zones["normal"] == -24
    path = tmp_path / "gradients.png"
    figure.savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_updates(tmp_path: Path) -> None:
    row = stepped(np.ones(3), np.array([2.0**-12 / UP, 2.0**-11, 1.0]))
    still = row._replace(name="still", dtype=torch.bfloat16, median=None)
    figure = diagnose.plot_updates(UpdateTable([row, still]))
    shares, medians = figure.axes
    assert [label.get_text() for label in shares.get_yticklabels()] == [
        "group 0[0] (float16)",
        "still (bfloat16)",
    ]
    assert [bar.get_width() for bar in shares.patches] == pytest.approx([100 / 3] * 6)
    assert list(medians.lines[0].get_xdata()) == [row.median]
    assert [line.get_xdata()[0] for line in medians.lines[1:]] == [
        2.0**-8,
        2.0**-9,
        2.0**-11,
        2.0**-12,
    ]
    figure.savefig(tmp_path / "updates.svg")
    assert "<svg" in (tmp_path / "updates.svg").read_text()


def test_pictures_of_nothing_and_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no gradient has been seen"):
        diagnose.plot_gradients(GradientReport({}, {}, 1.0, torch.float16))
    with pytest.raises(ValueError, match="no step has been seen"):
        diagnose.plot_updates(UpdateTable())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="not installed: pip install matplotlib"):
        diagnose.plot_gradients(GradientReport({"a": of([1])}, {}, 1.0, torch.float16))


# TensorBoard.


class Writer:
    """A SummaryWriter that remembers."""

    def __init__(self) -> None:
        self.scalars: dict[str, tuple[float, int]] = {}
        self.histograms: dict[str, Tensor] = {}
        self.figures: dict[str, Any] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars[tag] = value, step

    def add_histogram(self, tag: str, values: Tensor, step: int) -> None:
        self.histograms[tag] = values

    def add_figure(self, tag: str, figure: Any, step: int) -> None:
        self.figures[tag] = figure


def test_what_is_logged(device: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy, writer = Static(4.0), Writer()
    with diagnose.Watch(model, policy) as watch, UpdateRatios(model) as ratios:
        (model(torch.ones(1, 2, device=device)).sum() * 4).backward()
        optimizer.step()
        model[0].weight.grad[0] = torch.tensor([math.inf, math.nan], device=device)
        diagnose.log(writer, 7, watch, policy, ratios)
    assert writer.scalars["loss_scale"] == (4, 7)
    assert writer.scalars["gradients/weights/lost"] == (0, 7)
    assert writer.scalars["gradients/weights/headroom"] == (13, 7)  # 65504 / 4
    assert writer.scalars["gradients/activations/overflow"] == (0, 7)
    assert writer.scalars["gradients/activations/subnormal"] == (0, 7)
    assert writer.scalars["updates/lost/0.weight"] == (0, 7)
    assert writer.scalars["updates/median/0"][0] == ratios.medians["0"]
    assert writer.histograms["gradients/0.weight"].tolist() == [[0, 0], [1, 1]]
    assert not writer.figures
    diagnose.log(writer, 8, watch, figures=True)
    assert writer.scalars["loss_scale"] == (4, 8)
    assert list(writer.figures) == ["gradients/exponents"]


def test_only_what_is_given_is_logged() -> None:
    writer = Writer()
    diagnose.log(writer, 1)
    assert not writer.scalars
    diagnose.log(writer, 1, policy=Backoff())
    assert writer.scalars == {"loss_scale": (2.0**24, 1)}
    with diagnose.Watch(nn.Linear(1, 1)) as watch:
        diagnose.log(writer, 2, watch, figures=True)
    assert not writer.histograms
    assert not writer.figures
