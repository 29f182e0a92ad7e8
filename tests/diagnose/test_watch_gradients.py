"""Watch counts true gradients, changes no bit, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from counting import counted, found, of
from helpers import array, raw_bytes
from torch import Tensor, nn

import amp_mp as amp
from amp_mp import diagnose
from amp_mp.diagnose import UpdateRatios
from amp_mp.diagnose.gradient_watch import GradientReport
from amp_mp.scaling import Static


def model_and_data(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(inplace=True), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 1)
    )
    return model, torch.randn(32, 8), torch.randn(32, 1)


def train(model: nn.Module, x: Tensor, y: Tensor, scaler: Any = None, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = scaler or amp.GradScaler("cpu", enabled=False)
    for _ in range(steps):
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def hooks_of(model: nn.Module) -> list[Any]:
    return [
        hooks
        for thing in (*model.modules(), *model.parameters())
        for name in ("_forward_hooks", "_backward_hooks", "_post_accumulate_grad_hooks")
        if (hooks := getattr(thing, name, None))
    ]


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_the_gradients_counted_are_the_true_ones(device: str, scale: float) -> None:
    model, x, y = (each.to(device) for each in model_and_data())
    model[3].eval()
    seen: dict[str, Tensor] = {}
    h = x
    for i, module in enumerate(model):  # the same by hand, without anything in place
        h = nn.functional.relu(h) if i == 1 else module(h)
        h.retain_grad()
        seen[str(i)] = h
    nn.functional.mse_loss(h, y).backward()
    weights = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with diagnose.Watch(model, scale) as watch:
        (nn.functional.mse_loss(model(x), y) * scale).backward()
    assert watch.weights.keys() == weights.keys()
    for name, grad in weights.items():
        assert found(watch.weights[name]) == counted(array(grad)), name
    assert watch.activations.keys() == seen.keys()
    for name, value in seen.items():
        assert found(watch.activations[name]) == counted(array(value.grad)), name
    report = watch.report()
    assert found(report.weights) == counted(
        np.concatenate([array(g).ravel() for g in weights.values()])
    )
    assert report.scale == scale


@pytest.mark.parametrize("fails", [False, True])
def test_watching_changes_no_bit_and_leaves_no_hook(fails: bool) -> None:
    states = []
    for watched in (False, True):
        model, x, y = model_and_data()
        if watched:
            try:
                with diagnose.Watch(model), UpdateRatios(model):
                    assert hooks_of(model)
                    train(model, x, y)
                    if fails:
                        raise KeyError
            except KeyError:
                assert fails
            assert not hooks_of(model)
        else:
            train(model, x, y)
        states.append(raw_bytes([*model.state_dict().values(), torch.get_rng_state()]))
    assert states[0] == states[1]


def test_closing_unhooks_graphs_that_are_alive_and_copies_of_the_model() -> None:
    model, x, _ = model_and_data()
    watch = diagnose.Watch(model)
    copied = copy.deepcopy(model)
    out = model(x)
    assert out._backward_hooks
    watch.close()
    watch.close()
    assert not out._backward_hooks
    out.sum().backward()
    copied(x).sum().backward()
    assert not watch.weights
    assert not watch.activations


def test_watching_keeps_no_tensor_and_no_model_alive() -> None:
    model, x, _ = model_and_data()
    watch = diagnose.Watch(model)
    out = model(x)
    out.sum().backward()
    alive = [weakref.ref(t) for t in (out, model, *model.parameters())]
    alive += [weakref.ref(p.grad) for p in model.parameters()]
    assert len(watch._outputs) == 5
    del out
    gc.collect()
    assert not watch._outputs
    assert alive[0]() is None
    model.zero_grad()
    assert all(each() is None for each in alive[-6:])
    del model
    gc.collect()
    assert all(each() is None for each in alive)
    assert list(watch.gradients()) == []
    assert watch.report().weights.elements == 8 * 16 + 16 + 32 + 17


@pytest.mark.parametrize("every", [1, 2, 5])
def test_every_nth_gradient_is_counted_until_reset(every: int) -> None:
    model, x, y = model_and_data()
    with diagnose.Watch(model, every=every) as watch:
        train(model, x, y, steps=5)
        times = math.ceil(5 / every)
        assert watch.weights["4.bias"].elements == times
        assert watch.activations["4"].elements == times * 32
        watch.reset()
        assert str(watch.report()) == "no gradient has been seen"


class Odd(nn.Module):
    """Outputs that are no plain tensor, a module called twice, one without gradient, one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4)
        self.twice = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.table = nn.Embedding(10, 4, sparse=True)
        self.hands_out = HandsOut()
        self.wide = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, indices: Tensor) -> Tensor:
        out, (h, _) = self.rnn(self.twice(self.twice(self.table(indices))) + self.hands_out())
        return self.frozen(out).sum() + h.sum() + self.wide(out.double()).sum()


class HandsOut(nn.Module):
    """Returns its parameter, on which no hook may stay."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(4))

    def forward(self) -> Tensor:
        return self.value


def test_odd_modules_and_gradients() -> None:
    model = Odd()
    indices = torch.tensor([[1, 1, 2]])
    with diagnose.Watch(model) as watch:
        model(indices).backward()
        assert not model.hands_out.value._backward_hooks
    assert watch.activations["twice"].elements == 2 * 3 * 4
    assert watch.activations["rnn"].elements == (3 + 3) * 4  # out and h; c has no gradient
    assert watch.weights["table.weight"].elements == 2 * 4  # the rows that were looked up
    assert watch.weights.keys() == {
        *(n for n, _ in model.rnn.named_parameters(prefix="rnn")),
        "twice.weight",
        "twice.bias",
        "table.weight",
        "hands_out.value",
    }
    assert watch.left_out["wide.weight"] == "float64"
    assert "left out: wide.weight, float64" in str(watch.report())


def test_a_leaf_as_the_whole_model_is_named_by_its_class() -> None:
    model = nn.Linear(2, 2)
    with diagnose.Watch(model) as watch:
        model(torch.ones(1, 2)).sum().backward()
    assert list(watch.activations) == ["Linear"]


@pytest.mark.parametrize(
    "scaler",
    [
        8,
        Static(8.0),
        SimpleNamespace(loss_scale=8.0),
        torch.amp.GradScaler("cpu", init_scale=8.0),
        amp.GradScaler("cpu", init_scale=8.0),
        lambda: torch.tensor(8.0),
        amp.FP16_Optimizer(
            torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), 8.0, verbose=False
        ),
    ],
    ids=lambda scaler: type(scaler).__name__,
)
def test_whatever_holds_a_loss_scale_is_a_scaler(scaler: Any) -> None:
    model = nn.Linear(1, 1)
    with diagnose.Watch(model, scaler) as watch:
        (model(torch.ones(1, 1)).sum() * 8).backward()
    assert watch.weights["bias"].amax == 1
    assert watch.report().scale == 8
    assert [float(g) for _, g in watch.gradients()] == [1, 1]


def test_a_moving_scale_is_asked_at_every_gradient() -> None:
    model, x, y = model_and_data()
    model[3].eval()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    with diagnose.Watch(model, scaler) as watch:
        train(model, x, y, scaler)
    model, x, y = model_and_data()
    model[3].eval()
    with diagnose.Watch(model) as plain:
        train(model, x, y)
    assert scaler.get_scale() == 2.0**13
    for name, histogram in plain.weights.items():
        assert watch.weights[name].amax == pytest.approx(histogram.amax, rel=1e-6)


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (TypeError, {"scaler": "dynamic"}, "or a function that returns a number; found str"),
        (TypeError, {"scaler": object()}, "something with `get_scale"),
        (ValueError, {"scaler": -1}, "the loss scale must be finite and above 0, found -1"),
        (ValueError, {"every": 0}, "every must be a whole number above 0, found 0"),
        (ValueError, {"model": nn.ReLU()}, "no parameter that requires a gradient"),
    ],
)
def test_bad_arguments_of_watch(
    error: type[Exception], arguments: dict[str, Any], message: str
) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(error, match=message):
        diagnose.Watch(**{"model": model, **arguments})
    assert not hooks_of(model)


def test_the_report_prints_as_a_table() -> None:
    values = [2.0**-30, 2.0**-20, 1.0, 0.0, np.inf, np.nan, np.nan]
    report = GradientReport(
        {"head.weight": of(values)}, {"head": of([4.0])}, 2.0**10, torch.float16, {"x": "float64"}
    )
    lines = [line.split() for line in str(report).splitlines()]
    assert lines[0][-1] == "2^10"
    assert [row[:2] for row in lines[3:7]] == [
        ["weight", "(all)"],
        ["weight", "head.weight"],
        ["activation", "(all)"],
        ["activation", "head"],
    ]
    assert lines[4][2:6] == ["7", "14.29%", "0.00%", "33.33%"]
    assert lines[4][6:] == ["0.00%", "1", "2", "0.0", "+5", "binades"]
    assert lines[7] == ["left", "out:", "x,", "float64"]
    assert str(report).endswith("is 2^13: there 0.00% would be lost and 25.00% subnormal.")
    assert report.safe_log2_scale == 13
