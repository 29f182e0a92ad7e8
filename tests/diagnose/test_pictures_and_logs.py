"""Pictures of histograms and updates, and what TensorBoard gets."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counting import UP, of, stepped
from torch import Tensor, nn

from amp_mp import diagnose
from amp_mp.diagnose import UpdateRatios
from amp_mp.scaling import Backoff, Static


def test_the_picture_of_gradients(tmp_path: Path) -> None:
    weights = of(np.exp2(np.random.default_rng(0).uniform(-35, 0, 1000)))
    report = diagnose.GradientReport({"a": weights}, {"b": of([1.0])}, 2.0**10, torch.float16)
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
    path = tmp_path / "new" / "gradients.png"
    diagnose.save(figure, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_updates(tmp_path: Path) -> None:
    row = stepped(np.ones(3), np.array([2.0**-12 / UP, 2.0**-11, 1.0]))
    still = row._replace(name="still", dtype=torch.bfloat16, median=None)
    figure = diagnose.plot_updates(diagnose.UpdateTable([row, still]))
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
    diagnose.save(figure, tmp_path / "updates.svg")
    assert "<svg" in (tmp_path / "updates.svg").read_text()


def test_pictures_of_nothing_and_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no gradient has been seen"):
        diagnose.plot_gradients(diagnose.GradientReport({}, {}, 1.0, torch.float16))
    with pytest.raises(ValueError, match="no step has been seen"):
        diagnose.plot_updates(diagnose.UpdateTable())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="not installed: pip install matplotlib"):
        diagnose.plot_gradients(diagnose.GradientReport({"a": of([1])}, {}, 1.0, torch.float16))


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
    with diagnose.watch(model, policy) as watch, UpdateRatios(model) as ratios:
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
    with diagnose.watch(nn.Linear(1, 1)) as watch:
        diagnose.log(writer, 2, watch, figures=True)
    assert not writer.histograms
    assert not writer.figures
