"""The averaging pass: the formula, bit for bit, whatever numbers are stored as."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import reference
import reference_formats as formats
import torch
from helpers import DTYPES, RAGGED, array, assert_same, on, random
from numpy.typing import NDArray
from torch import Tensor

from amp_mp import _C

DECAYS = (0.0, 0.3, 0.5, 0.7, 0.9999, 1.0)
# How a number may be stored: the dtype of its first part, and its master.
STORED = (
    "float32",
    "bfloat16",
    "float16",
    "bfloat16 split32",
    "bfloat16 split24",
    "float16 split32",
    "float16 split24",
)
AVERAGES = ("float32", "bfloat16 split32", "float16 split32")
SIZES = (*RAGGED[:-1], 70_001)


def numbers(size: int, seed: int) -> NDArray[np.float32]:
    """With zeros, infinities, NaN and subnormals; finite ones are far below the largest."""
    values = random(size, seed, special=True)
    return np.where(np.isfinite(values) & (np.abs(values) > 1e30), np.float32(7), values)


def store(x: NDArray[np.float32], stored: str) -> list[NDArray[Any]]:
    """The arrays that hold x, by the definition of the format."""
    dtype, _, split = stored.partition(" ")
    if split:
        return formats.encode(x, split, weight=dtype)
    return [reference.store(x, dtype, saturating=True)]


def held(parts: list[NDArray[Any]], stored: str) -> NDArray[np.float32]:
    dtype, _, split = stored.partition(" ")
    return formats.decode(parts, split, dtype) if split else parts[0]


def tensors(
    parts: list[NDArray[Any]], stored: str, device: str, shift: int
) -> tuple[Tensor, Tensor | None]:
    """On the device, `shift` elements off an aligned address."""
    dtype = DTYPES[stored.split()[0]]
    if len(parts) == 1:
        return on(device, parts[0], dtype, shift), None
    data = torch.empty(parts[0].size + shift, dtype=dtype, device=device)[shift:]
    data.copy_(torch.from_numpy(parts[0].view(np.int16)).view(dtype))
    master = torch.from_numpy(parts[1])
    return data, torch.empty_like(master, device=device).copy_(master)


def raw(tensor: Tensor) -> NDArray[Any]:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("average", AVERAGES)
def test_the_formula_bit_for_bit(device: str, average: str, decay: float) -> None:
    """All formats of the next value and all sizes in a single call."""
    rows, wanted = [], []
    for number, (stored, size) in enumerate(itertools.product(STORED, SIZES)):
        before, value = store(numbers(size, number), average), store(numbers(size, 99), stored)
        rows.append(
            (*tensors(before, average, device, number % 3), *tensors(value, stored, device, 0))
        )
        begin = held(before, average)
        if average == "float16 split32":
            begin = formats.float16_average(before[0], before[1])
        after = reference.averaged(begin, held(value, stored), decay)
        wanted.append(held(store(after, average), average))
    _C.average_(*(list(column) for column in zip(*rows, strict=True)), decay)
    for (to, master, *_), expected in zip(rows, wanted, strict=True):
        parts = [array(to)]
        if master is not None:
            parts = [raw(to).view(np.uint16), master.cpu().numpy().view(np.int16)]
        assert_same(held(parts, average), expected, f"{average}, {to.numel()}")


@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 4, 5)])
def test_the_next_value_may_lie_otherwise_in_memory(device: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device=device)
    weight, remainder = x.bfloat16(), torch.randint(-9, 9, shape, dtype=torch.int16, device=device)
    straight = [torch.zeros(shape, device=device) for _ in range(3)]
    crossed = [torch.zeros(shape, device=device) for _ in range(3)]

    def turned(t: Tensor) -> Tensor:
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)

    _C.average_(straight, [None] * 3, [x, x, weight], [None, None, remainder], 0.25)
    values = [turned(x), x.repeat_interleave(2, 0)[::2], turned(weight)]
    _C.average_(crossed, [None] * 3, values, [None, None, turned(remainder)], 0.25)
    for a, b in zip(straight, crossed, strict=True):
        assert torch.equal(a, b)


def test_tensors_that_do_not_fit_are_refused_by_name_and_nothing_changes(device: str) -> None:
    def call(to: Any, value: Any, master: Any = None, decay: float = 0.5, own: Any = None) -> None:
        _C.average_(
            [torch.ones(3, device=device), to], [None, own], [to, value], [None, master], decay
        )

    a, b = torch.zeros(3, device=device), torch.ones(3, device=device)
    low = b.bfloat16()
    with pytest.raises(ValueError, match=r"from\[1\] has shape \[2\], but to\[1\] has shape \[3\]"):
        call(a, b[:2])
    with pytest.raises(ValueError, match=r"from_masters\[1\] has shape \[2\], but from\[1\]"):
        call(a, low, torch.zeros(2, dtype=torch.int16, device=device))
    with pytest.raises(TypeError, match=r"from_masters\[1\] .* does not go with from\[1\]"):
        call(a, low, torch.zeros(3, dtype=torch.int32, device=device))
    with pytest.raises(TypeError, match=r"from\[1\] .* must be float32, float16 or bfloat16"):
        call(a, b.double())
    with pytest.raises(ValueError, match=r"to\[1\] .* is a view with gaps"):
        call(torch.zeros(6, device=device)[::2], b)
    with pytest.raises(TypeError, match=r"from\[1\] is None"):
        call(a, None)
    for decay in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"decay must be in \[0, 1\], found"):
            call(a, b, decay=decay)
    with pytest.raises(ValueError, match="another list has 0"):
        _C.average_([a], [], [b], [None], 0.5)
    with pytest.raises(ValueError, match=r"to\[0\] and to\[1\] are one tensor"):
        _C.average_([a, a], [None, None], [b, b], [None, None], 0.5)
    assert a.tolist() == [0, 0, 0]
    _C.average_([], [], [], [], 0.5)


def test_autograd_sees_the_write(device: str) -> None:
    to = torch.ones(3, device=device)
    before = to._version
    _C.average_([to], [None], [torch.zeros(3, device=device)], [None], 0.5)
    assert to._version > before


def test_an_average_of_float16_leaves_zero_by_any_updates(device: str) -> None:
    """Those of a layer that begins at 0 are a 10,000th of its weights, far below float16's."""
    target = torch.linspace(-1e-4, 1e-4, 101, device=device)
    average = torch.zeros(101, dtype=torch.float16, device=device)
    master = torch.zeros(101, dtype=torch.int16, device=device)
    for _ in range(1000):
        _C.average_([average], [master], [target], [None], 0.9999)
    found = _C.decode(average, master, "float16_split32")
    wanted = target.double() * (1 - 0.9999**1000)
    step = 2.0**-41  # half of what the remainder counts in
    wanted[(average == 0) & (wanted.abs() < 2.0**-25 + 1000 * step)] = 0  # which are read as 0
    assert (found.double() - wanted).abs().max() <= 1000 * step
