"""The one read of the gradients: sums in the fixed order, maxima, counts."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from helpers import DTYPES, RAGGED, array, on, random

from amp_mp import _C

CASES = {
    "ordinary": 1.0,
    "squares overflow float": 1e25,
    "squares underflow float": 1e-30,
    "all zero": 0.0,
}


def rows(tensors: list[torch.Tensor]) -> list[tuple[float, ...]]:
    return [tuple(row) for row in _C.measure(tensors).cpu().tolist()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", CASES.values(), ids=CASES)
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
def test_measuring_equals_the_reference(device: str, dtype: str, spread: float, shift: int) -> None:
    if dtype == "float16" and spread > 1:
        spread = 100.0  # 1e25 is not a float16
    sizes = [*RAGGED[:-1], 65536, 65537, 200_001]
    tensors = [on(device, random(n, n, spread), DTYPES[dtype], shift) for n in sizes]
    wanted = [reference.measure(array(t)) for t in tensors]
    total = (
        reference.combine([w[0] for w in wanted]),
        max(w[1] for w in wanted),
        sum(w[2] for w in wanted),
    )
    assert rows(tensors) == [*wanted, total]


@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_elements_are_counted_and_left_out(device: str, dtype: str) -> None:
    sizes = (1, 64, 4097, 70_000)
    tensors = [on(device, random(n, n, 1.0, special=True), DTYPES[dtype]) for n in sizes]
    found = rows(tensors)
    for row, tensor in zip(found, tensors, strict=False):
        assert row == reference.measure(array(tensor))
    assert found[-1][2] == sum(int((~torch.isfinite(t)).sum()) for t in tensors) > 0


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan], ids=["inf", "-inf", "nan"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_element_anywhere_is_found(device: str, dtype: str, value: float) -> None:
    for size, positions in ((1, [0]), (65, [0, 63, 64]), (8200, [0, 4095, 4096, 8199])):
        for position in positions:
            x = random(size, 1)
            x[position] = value
            assert rows([on(device, x, DTYPES[dtype])])[-1][2] == 1


def test_no_finite_gradient_has_an_infinite_norm(device: str) -> None:
    x = torch.full((100_000,), 3e38, device=device)
    squares, largest, bad = rows([x])[-1]
    assert squares == pytest.approx(1e5 * float(np.float32(3e38)) ** 2, rel=1e-12)
    assert (largest, bad) == (float(np.float32(3e38)), 0)


def test_an_empty_list_and_empty_tensors_measure_zero(device: str) -> None:
    assert rows([torch.empty(0, device=device)] * 3) == [(0.0, 0.0, 0.0)] * 4
    assert rows([]) == [(0.0, 0.0, 0.0)]
    assert rows([None, torch.ones(2, device=device)]) == [(0, 0, 0), (2, 1, 0), (2, 1, 0)]


def test_layout_does_not_matter_to_what_is_measured(device: str) -> None:
    x = torch.randn(4, 6, 5, 3, device=device)
    for view in (
        x.to(memory_format=torch.channels_last),
        x[:, ::2],
        x[0, 0, 0].expand(7, 3),
        x.permute(3, 2, 1, 0),
    ):
        squares, largest, bad = rows([view])[0]
        assert squares == pytest.approx(float((view.double() ** 2).sum()), rel=1e-6)
        assert (largest, bad) == (float(view.abs().max()), 0)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    tensors = [on("cpu", random(n, n), torch.bfloat16) for n in (500_000, 3, 70_000, 0, 1_000_003)]
    before = torch.get_num_threads()
    expected = rows(tensors)
    try:
        torch.set_num_threads(threads)
        assert rows(tensors) == expected
    finally:
        torch.set_num_threads(before)
