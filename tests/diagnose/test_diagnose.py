"""Exponent histograms, gradients as they come, overflows, updates, and what is drawn of them."""

from __future__ import annotations

import copy
import gc
import math
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DTYPES, array, on, random, raw_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

import amp_mp as amp
from amp_mp import diagnose
from amp_mp.diagnose import ExponentHistogram, OverflowTracker, UpdateRatios
from amp_mp.diagnose.histogram import EXPONENTS, limits
from amp_mp.scaling import Backoff, Static

POWERS = np.exp2(np.arange(-149, 128, dtype=np.float64))
HALF = np.array([*np.exp2(np.arange(-24.0, 16)), 65504, 2**-14 - 2**-24, 0, np.inf, np.nan])


def counted(values: NDArray[np.float32]) -> dict[Any, int]:
    """The oracle: exponents by np.frexp in float64."""
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        x = np.abs(values.astype(np.float64))
    finite = x[np.isfinite(x) & (x > 0)]
    exponents, counts = np.unique(np.frexp(finite)[1] - 1, return_counts=True)
    return {
        **dict(zip(exponents.tolist(), counts.tolist(), strict=True)),
        "zero": int((x == 0).sum()),
        "inf": int(np.isinf(x).sum()),
        "nan": int(np.isnan(x).sum()),
        "amax": float(finite.max(initial=0)),
    }


def found(histogram: ExponentHistogram) -> dict[Any, int]:
    counts = histogram.counts
    assert counts.dtype == torch.int64
    assert counts.shape == (277,)
    return {
        **{e: n for e, n in zip(EXPONENTS, counts.tolist(), strict=True) if n},
        "zero": histogram.zeros,
        "inf": histogram.infs,
        "nan": histogram.nans,
        "amax": histogram.amax,
    }


def of(values: Any, device: str = "cpu", dtype: torch.dtype = torch.float32) -> ExponentHistogram:
    return ExponentHistogram.of(on(device, np.asarray(values, dtype=np.float32).ravel(), dtype))


# Histograms.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [1.0, 1e-30, 1e30])
def test_counts_equal_numpys_frexp(device: str, dtype: str, spread: float) -> None:
    tensor = on(device, random(50_001, 1, spread, special=True), DTYPES[dtype])
    assert found(ExponentHistogram.of(tensor)) == counted(array(tensor))


def test_every_power_of_two_and_its_neighbours_are_in_their_bins(device: str) -> None:
    powers = POWERS.astype(np.float32)
    below = np.nextafter(powers, np.float32(0))
    above = np.nextafter(powers, np.float32(np.inf))
    for values in (powers, -powers, below, above):
        assert found(of(values, device)) == counted(values)
    assert of(powers, device).counts.tolist() == [1] * 277


def test_every_float16_there_is(device: str) -> None:
    values = np.arange(2**16, dtype=np.uint16).view(np.float16)
    tensor = torch.from_numpy(values).to(device)
    assert found(ExponentHistogram.of(tensor)) == counted(values.astype(np.float32))


def test_subnormals_are_counted_where_the_processor_flushes_them() -> None:
    values = np.array([2.0**-149, 3 * 2.0**-149, 2.0**-127, 2.0**-126], dtype=np.float32)
    tensor, wanted = torch.from_numpy(values), counted(values)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        assert found(ExponentHistogram.of(tensor)) == wanted
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(6, 4).T, torch.ones(2, 3)[:, ::2], torch.ones(()), torch.ones(3).expand(2, 3)],
    ids=["transposed", "gaps", "scalar", "expanded"],
)
def test_any_layout_is_counted_element_by_element(device: str, tensor: Tensor) -> None:
    seen = ExponentHistogram.of(tensor.to(device))
    assert found(seen) == {0: tensor.numel(), "zero": 0, "inf": 0, "nan": 0, "amax": 1.0}


def test_nothing_is_counted_of_nothing(device: str) -> None:
    for seen in (ExponentHistogram(), of([], device)):
        assert seen.elements == 0
        assert seen.largest_safe_log2_scale() is None
        assert seen.at(8.0)[2:] == (0, 0, 0, None)


def test_histograms_add_up(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = random(10_000, 2, special=True)
    parts = [of(values[:1], device), of([], device), of(values[1:7000], device), of(values[7000:])]
    assert found(sum(parts, ExponentHistogram())) == counted(values)
    monkeypatch.setattr("amp_mp.diagnose.histogram._CHUNK", 999)
    assert found(of(values, device)) == counted(values)


@settings(deadline=None)
@given(st.lists(st.floats(width=32), max_size=20), st.integers(-20, 40))
def test_any_floats_at_any_power_of_two(values: list[float], shift: int) -> None:
    array = np.array(values, dtype=np.float32)
    seen = of(array)
    assert found(seen) == counted(array)
    check_diagnosis(seen, array, 2.0**shift)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_is_divided_out(device: str, dtype: str) -> None:
    tensor = on(device, random(5000, 3, special=True), DTYPES[dtype])
    for scale in (1024.0, 3.0):
        wanted = counted(array(tensor) / np.float32(scale))
        assert found(ExponentHistogram.of(tensor, scale)) == wanted


def test_what_is_no_histogram_is_refused() -> None:
    with pytest.raises(TypeError, match=r"float16, bfloat16 and float32 tensors, found torch\.flo"):
        ExponentHistogram.of(torch.ones(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="scale must be finite and above 0, found 0"):
        ExponentHistogram.of(torch.ones(3), 0)
    with pytest.raises(ValueError, match="scale must be finite and above 0, found inf"):
        of([1]).at(math.inf)
    with pytest.raises(ValueError, match=r"dtype must be float16, bfloat16 .*, found torch\.int8"):
        of([1]).at(1.0, torch.int8)


# What a scale makes of them.


def test_the_edges_of_the_formats() -> None:
    assert limits(torch.float16) == (2.0**-25, 2.0**-14, 65504, 65520)
    assert limits(torch.bfloat16) == (2.0**-134, 2.0**-126, (2 - 2**-7) * 2.0**127, 255.5 * 2**120)
    assert limits(torch.float32)[:3] == (2.0**-150, 2.0**-126, float(np.finfo(np.float32).max))


def test_the_edges_are_where_rounding_changes() -> None:
    low = torch.tensor([2.0**-25, -(2.0**-25)])
    assert low.half().tolist() == [0, 0]
    assert (torch.nextafter(low, low * 2).half().abs() == 2.0**-24).all()
    high = torch.tensor([65519.99, 65520])
    assert high.half().tolist() == [65504, math.inf]
    assert of(low).at(1.0).lost == 1
    assert of(torch.nextafter(low, low * 2)).at(1.0).lost == 0
    assert of([65519.99]).at(1.0).overflow == 0
    assert of([65520]).at(1.0).overflow == 1
    assert of([-65520, 1, 1, 1]).at(1.0).overflow == 0.25
    assert of([2.0**-14, 2.0**-14 - 2.0**-30]).at(1.0).subnormal == 0.5


def check_diagnosis(
    seen: ExponentHistogram, values: NDArray[np.float32], scale: float, dtype: str = "float16"
) -> None:
    """Against shares that NumPy counts in float64, exact where docs say so."""
    x = np.abs(values.astype(np.float64))
    x = x[np.isfinite(x) & (x > 0)] * scale
    edges, n = limits(DTYPES[dtype]), max(1, x.size)
    diagnosis = seen.at(scale, DTYPES[dtype])
    assert diagnosis.lost == (x <= edges.lost).sum() / n
    assert diagnosis.subnormal == ((x > edges.lost) & (x < edges.normal)).sum() / n
    over = (x >= edges.overflow).sum() / n
    assert (diagnosis.overflow > 0) == (over > 0)
    straddling = np.frexp(x)[1] == np.frexp(edges.largest)[1]
    assert abs(diagnosis.overflow - over) <= (straddling.sum() + 1e-9) / n
    safe, headroom = seen.largest_safe_log2_scale(DTYPES[dtype]), diagnosis.headroom
    if x.size == 0:
        assert safe is None
        assert headroom is None
    else:
        assert safe is not None
        assert headroom is not None
        amax = float(x.max() / scale)
        assert amax * 2.0**safe <= edges.largest < amax * 2.0 ** (safe + 1)
        assert amax * scale * 2.0**headroom <= edges.largest < amax * scale * 2.0 ** (headroom + 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shift", [-24, -3, 0, 1, 15, 30])
def test_shares_equal_numpys(device: str, dtype: str, shift: int) -> None:
    values = random(20_000, 4, special=True)
    values[:4] = 2.0**-25, 65504, 65519.99, 65520
    check_diagnosis(of(values, device), values, 2.0**shift, dtype)
    halves = HALF[np.isfinite(HALF)].astype(np.float32)  # nearly all of it ties and edges
    check_diagnosis(of(halves, device), halves, 2.0**shift, dtype)


def test_a_bin_that_an_edge_cuts_is_split_evenly() -> None:
    generator = np.random.default_rng(5)
    values = generator.uniform(2.0**-20, 2.0**-19, 100_000).astype(np.float32)
    diagnosis = of(values).at(2.0**-5 / 1.25)  # the edge is at a quarter of the bin
    assert diagnosis.lost == pytest.approx(0.25, abs=1e-3)
    assert (values <= 1.25 * 2.0**-20).mean() == pytest.approx(diagnosis.lost, abs=0.01)


def test_a_scale_of_8_saves_three_binades() -> None:
    values = np.exp2(np.arange(-31.0, -13))
    assert np.array_equal(values[of(values).counts.numpy()[-31 + 149 : -13 + 149] > 0], values)
    assert of(values).at(1.0).lost == (values <= 2.0**-25).mean()
    assert of(values).at(8.0).lost == (values <= 2.0**-28).mean()
    assert of([2.0**-27]).at(8.0).lost == 0


@pytest.mark.parametrize("amax", [65504, 65505, 32752, 32753, 1.0, 2.0**-149, 3.4e38])
def test_the_largest_safe_scale(amax: float) -> None:
    safe = of([amax, -amax / 2, 0, np.inf, np.nan]).largest_safe_log2_scale()
    assert safe == math.floor(math.log2(65504 / float(np.float32(amax))))


# Watching a model.


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
    with diagnose.watch(model, scale) as watch:
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
                with diagnose.watch(model), UpdateRatios(model):
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
    watch = diagnose.watch(model)
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
    watch = diagnose.watch(model)
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
    with diagnose.watch(model, every=every) as watch:
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
    with diagnose.watch(model) as watch:
        model(indices).backward()
        assert not model.hands_out.value._backward_hooks
    assert watch.activations["twice"].elements == 2 * 3 * 4
    assert watch.activations["rnn"].elements == (3 + 3) * 4  # out and h; c has no gradient
    assert watch.weights["table.weight"].elements == 2 * 4  # the rows that were looked up
    assert watch.weights.keys() == {
        *(n for n, _ in model.rnn.named_parameters(prefix="rnn")),
        *("twice.weight", "twice.bias", "table.weight", "hands_out.value"),
    }
    assert watch.left_out["wide.weight"] == "float64"
    assert "left out: wide.weight, float64" in str(watch.report())


def test_a_leaf_as_the_whole_model_is_named_by_its_class() -> None:
    model = nn.Linear(2, 2)
    with diagnose.watch(model) as watch:
        model(torch.ones(1, 2)).sum().backward()
    assert list(watch.activations) == ["Linear"]


class Holder:
    """Something with a loss scale under a name."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


@pytest.mark.parametrize(
    "scaler",
    [
        8,
        Static(8.0),
        Holder(loss_scale=8.0),
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
    with diagnose.watch(model, scaler) as watch:
        (model(torch.ones(1, 1)).sum() * 8).backward()
    assert watch.weights["bias"].amax == 1
    assert watch.report().scale == 8
    assert [float(g) for _, g in watch.gradients()] == [1, 1]


def test_a_moving_scale_is_asked_at_every_gradient() -> None:
    model, x, y = model_and_data()
    model[3].eval()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    with diagnose.watch(model, scaler) as watch:
        train(model, x, y, scaler)
    model, x, y = model_and_data()
    model[3].eval()
    with diagnose.watch(model) as plain:
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
        diagnose.watch(**{"model": model, **arguments})
    assert not hooks_of(model)


def test_the_report_prints_as_a_table() -> None:
    values = [2.0**-30, 2.0**-20, 1.0, 0.0, np.inf, np.nan, np.nan]
    report = diagnose.GradientReport(
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


# Overflows.


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


# Updates.


def stepped(weight: NDArray[np.float64], update: NDArray[np.float64], **options: Any) -> Any:
    """A float32 parameter that one step of SGD moves by the updates; the row for it."""
    param = nn.Parameter(torch.from_numpy(weight.astype(np.float32)))
    optimizer = torch.optim.SGD([param], lr=1.0)
    param.grad = torch.from_numpy(-update.astype(np.float32))
    with UpdateRatios(optimizer, **options) as ratios:
        optimizer.step()
    (row,) = ratios.report()
    return row


UP = 1 + 2.0**-10  # a little more than


@pytest.mark.parametrize(
    ("weight", "update", "fate"),
    [
        (1.0, 2.0**-12 / UP, "lost"),
        (1.0, -(2.0**-12) / UP, "lost"),
        (1.0, -(2.0**-12), "between"),  # a tie: the spacing below 1 is half that above
        (1.0, 2.0**-11, "between"),  # a tie, which goes to 1
        (1.0, 2.0**-11 * UP, "kept"),
        (1.0, -(2.0**-11) * UP, "kept"),
        (2 - 2.0**-10, 2.0**-12, "lost"),  # 2^-11 is half the spacing here: a ratio of 2^-12
        (2 - 2.0**-10, 2.0**-11, "between"),
        (2.0**-24, 2.0**-25 / UP, "lost"),  # subnormal: however large the ratio
        (2.0**-24, 2.0**-25, "between"),
        (2.0**-24, 2.0**-25 * UP, "kept"),
        (2.0**-14, -(2.0**-25) / UP, "lost"),  # the spacing below is that of the subnormals
        (0.0, 2.0**-25 * UP, "kept"),
        (0.0, 2.0**-26, "lost"),
    ],
)
def test_which_updates_float16_loses(weight: float, update: float, fate: str) -> None:
    row = stepped(np.array([weight]), np.array([update]))
    assert (row.elements, getattr(row, fate)) == (1, 1)
    assert row.dtype == torch.float16


def test_bfloat16_loses_updates_eight_times_as_large() -> None:
    weight = np.ones(3)
    update = np.array([2.0**-9 / 1.01, 2.0**-8, 2.0**-8 * 1.01])
    row = stepped(weight, update, dtype=torch.bfloat16)
    assert (row.lost, row.between, row.kept) == (1 / 3, 1 / 3, 1 / 3)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_certain_is_certain(seed: int) -> None:
    """Rounds to float16 by NumPy: what is said to be lost is lost, what to be kept is kept."""
    generator = np.random.default_rng(seed)
    size = 500
    half = (generator.standard_normal(size) * np.exp2(generator.uniform(-26, 4, size))).astype("f2")
    weight = half.astype(np.float64)
    ratio = np.exp2(generator.uniform(-15, -8, size)) * generator.choice([-1, 1], size)
    update = np.where(weight == 0, 2.0**-25, weight) * ratio
    moved = (weight - (-update).astype(np.float32)).astype(np.float32)
    change = moved.astype(np.float64) - weight  # the step's, exact
    same = (weight + change).astype(np.float16) == half
    size_of = np.abs(weight)
    lost = np.abs(change) < np.maximum(size_of * 2.0**-12, 2.0**-25)
    kept = np.abs(change) > np.maximum(size_of * 2.0**-11, 2.0**-25)
    assert same[lost].all()
    assert not same[kept].any()
    row = stepped(weight, update)
    assert row.elements == size
    assert row.lost == lost.mean()
    assert row.kept == kept.mean()
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.sort((np.abs(change) / size_of)[weight != 0])
    assert row.median == ratios[(len(ratios) - 1) // 2]


def test_the_median_is_the_layers_and_elements_at_rest_are_left_out() -> None:
    model = nn.Linear(2, 3)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.weight.grad = torch.tensor([[0.5, 0.0], [0.0, 0.0], [0.0, 0.0]])
    model.bias.grad = torch.tensor([0.25, 0.125, 0.0])
    with UpdateRatios(nn.ModuleDict({"layer": model})) as ratios:
        optimizer.step()
        model.zero_grad()
        optimizer.step()
    assert [row.elements for row in ratios.report()] == [1, 2]
    assert ratios.medians == {"layer": 0.25}
    table = str(ratios.report()).splitlines()
    assert table[2].split()[:3] == ["layer.weight", "float16", "1"]
    assert table[2].split()[3:] == ["0.00%", "0.00%", "100.00%", "0.25"]
    ratios.reset()
    assert str(ratios.report()) == "no step of an optimizer has been seen"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_are_what_is_measured(device: str, dtype: torch.dtype) -> None:
    model = nn.Linear(1, 2, bias=False)
    nn.init.ones_(model.weight)
    optimizer = amp.optim.SGD(amp.prepare(model.to(device), dtype).parameters(), lr=1.0)
    eps = torch.finfo(dtype).eps
    with UpdateRatios(optimizer) as ratios:
        for _ in range(2):  # the first makes the master
            model.weight.grad = torch.tensor([[eps / 5], [eps]], dtype=dtype, device=device)
            optimizer.step()
    (row,) = ratios.report()
    assert row[:6] == ("group 0[0]", dtype, 2, 0.5, 0, 0.5)


def test_without_masters_what_happened_is_shown(device: str) -> None:
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16, device=device))
    optimizer = torch.optim.SGD([("weight", param)], lr=1.0)
    param.grad = torch.tensor([2.0**-10, -(2.0**-8), 2.0**-7, 0], dtype=param.dtype, device=device)
    with UpdateRatios(optimizer) as ratios:
        optimizer.step()
    (row,) = ratios.report()
    assert row[:6] == ("weight", torch.bfloat16, 3, 2 / 3, 0, 1 / 3)


def test_a_skipped_step_is_not_counted(device: str) -> None:
    param = nn.Parameter(torch.ones(4, device=device))
    optimizer = amp.optim.SGD([param], lr=0.1, check_overflow=True)
    with UpdateRatios(optimizer) as ratios:
        param.grad = torch.tensor([1.0, 1.0, 1.0, math.inf], device=device)
        optimizer.step()
        assert not ratios.report()
        param.grad = torch.ones(4, device=device)
        optimizer.step()
    assert ratios.report()[0].elements == 4
    param.grad.fill_(1)
    optimizer.step()
    assert ratios.report()[0].elements == 4, "closed"


def test_fp16_optimizer_is_measured_by_its_masters() -> None:
    model = nn.Linear(2, 1).half()
    optimizer = amp.FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
    with UpdateRatios(optimizer) as ratios:
        optimizer.backward(model(torch.ones(1, 2).half()).sum())
        optimizer.step()
    assert [row[:3] for row in ratios.report()] == [
        ("group 0[0]", torch.float16, 2),
        ("group 0[1]", torch.float16, 1),
    ]


def test_bad_arguments_of_update_ratios() -> None:
    with pytest.raises(TypeError, match="takes an optimizer or a module, found list"):
        UpdateRatios([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype must be float16, bfloat16 or float32"):
        UpdateRatios(dtype=torch.float64)


# What the tools say of runs that go wrong, and that they do go wrong.


class Faint(nn.Module):
    """Gradients of 2^-27, of which float16 keeps nothing."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.dtype = dtype

    def forward(self) -> Tensor:
        return ((self.weight.to(self.dtype) * 2.0**-10).float() * 2.0**-17).sum()


def test_without_loss_scaling_training_stalls_and_the_histogram_foretells_it() -> None:
    model = Faint(torch.float32)
    with diagnose.watch(model) as watch:
        model().backward()
    for scale, lost in ((1.0, 1.0), (4.0, 1.0), (8.0, 0.0), (1024.0, 0.0)):
        assert watch.report(scale)[0].diagnosis.lost == lost
        model = Faint(torch.float16)
        optimizer = amp.FP16_Optimizer(
            torch.optim.SGD(model.parameters(), lr=2.0**20), scale, verbose=False
        )
        for _ in range(4):
            optimizer.zero_grad()
            optimizer.backward(model())
            optimizer.step()
        assert (model.weight == (1.0 if lost else 1 - 4 * 2.0**-7)).all()


def test_without_masters_training_stalls_and_the_ratios_say_why() -> None:
    """w goes from 1 to 0 in steps of 2^-10, which bfloat16 loses beside 1."""
    ends = {}
    for masters in (False, True):
        model = amp.prepare(nn.Linear(1, 1, bias=False), torch.bfloat16)
        nn.init.ones_(model.weight)
        kind = amp.optim.SGD if masters else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=2.0**-10)
        with UpdateRatios(model) as ratios:
            for _ in range(512):
                model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        ends[masters] = model.weight.item()
        assert ratios.report()[0].name == "weight"
        assert ratios.report()[0].lost == (1.0 if not masters else pytest.approx(0.99, abs=0.02))
    assert ends == {False: 1.0, True: 0.5}


# Pictures.


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
