"""Exponent histograms count what NumPy counts; diagnoses follow from the counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from counting import counted, found, of
from helpers import DTYPES, array, on, random
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from amp_mp.diagnose import ExponentHistogram
from amp_mp.diagnose.histogram import limits

POWERS = np.exp2(np.arange(-149, 128, dtype=np.float64))
HALF = np.array([*np.exp2(np.arange(-24.0, 16)), 65504, 2**-14 - 2**-24, 0, np.inf, np.nan])


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
    with pytest.raises(
        ValueError, match=r"dtype must be .*torch.float16 or torch.bfloat16, found torch\.int8"
    ):
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
