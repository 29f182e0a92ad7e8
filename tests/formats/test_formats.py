"""Stored formats: every conversion against the definition of the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import reference
import torch
from helpers import DTYPES, array, assert_same, interesting_floats, on
from torch import Tensor

from amp_mp import _C

LOW = ("float16", "bfloat16")


@pytest.mark.parametrize("name", LOW)
@pytest.mark.parametrize("saturating", [False, True], ids=["ieee", "saturating"])
def test_encoding_rounds_to_nearest_even(device: str, name: str, saturating: bool) -> None:
    x = interesting_floats()
    to = torch.empty(x.size, dtype=DTYPES[name], device=device)
    _C.copy_([to], [on(device, x, torch.float32)], saturate=saturating)
    assert_same(array(to), reference.store(x, name, saturating=saturating), name)


@pytest.mark.parametrize("name", LOW)
def test_every_nan_is_stored_as_one(device: str, name: str) -> None:
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0xFF800001, 0x7FC12345], dtype=np.uint32)
    to = torch.empty(bits.size * 16, dtype=DTYPES[name], device=device)
    _C.copy_([to], [on(device, np.repeat(bits, 16).view(np.float32), torch.float32)])
    canonical = 0x7E00 if name == "float16" else 0x7FC0
    assert set((to.cpu().view(torch.int16).int() & 0xFFFF).tolist()) == {canonical}


@pytest.mark.parametrize("name", LOW)
def test_decoding_is_exact_for_all_65536_patterns(device: str, name: str) -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    low = patterns.view(DTYPES[name]).to(device)
    to = torch.empty(low.numel(), device=device)
    _C.copy_([to], [low])
    bits = patterns.numpy().view(np.uint16)
    wanted = (
        bits.view(np.float16).astype(np.float32)
        if name == "float16"
        else (bits.astype(np.uint32) << 16).view(np.float32)
    )
    assert_same(array(to), wanted, name)


@pytest.mark.parametrize("flush", [False, True], ids=["kept", "flushed"])
def test_float16_has_the_same_bits_where_denormals_are_flushed(flush: bool) -> None:
    """Every pattern decoded and every kind of float32 encoded, to the bit, NaNs included."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    halves = torch.from_numpy(patterns.view(np.int16)).view(torch.float16)
    floats = torch.from_numpy(interesting_floats())
    wide, low = torch.empty(halves.numel()), torch.empty(floats.numel(), dtype=torch.float16)
    if not torch.set_flush_denormal(flush) and flush:
        pytest.fail("this processor cannot flush denormals")
    try:
        _C.copy_([wide], [halves])
        _C.copy_([low], [floats])
    finally:
        torch.set_flush_denormal(False)
    # A NaN keeps its payload and becomes a quiet one; encoded, it becomes 0x7E00.
    nan = (patterns & 0x7FFF) > 0x7C00
    payload = (patterns.astype(np.uint32) & 0x3FF) << 13
    quiet = ((patterns.astype(np.uint32) & 0x8000) << 16) | 0x7FC00000 | payload
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = patterns.view(np.float16).astype(np.float32).view(np.uint32)
        rounded = floats.numpy().astype(np.float16)
    np.testing.assert_array_equal(wide.numpy().view(np.uint32), np.where(nan, quiet, wanted))
    bits = np.where(np.isnan(rounded), np.uint16(0x7E00), rounded.view(np.uint16))
    np.testing.assert_array_equal(low.numpy().view(np.uint16), bits)


def test_the_reference_agrees_with_numpy_and_torch() -> None:
    x = interesting_floats()
    with np.errstate(over="ignore", invalid="ignore"):
        assert_same(
            reference.store(x, "float16", saturating=False),
            x.astype(np.float16).astype(np.float32),
            "float16",
        )
    torchs = torch.from_numpy(x).bfloat16().float().numpy()
    assert_same(reference.store(x, "bfloat16", saturating=False), torchs, "bfloat16")


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_copies_multiply_in_float32_and_round_once(
    device: str, source: str, target: str, shift: int
) -> None:
    sizes = [0, 1, 7, 8, 63, 64, 65, 257, 5000]
    factor = 1 / 3
    values = [np.linspace(-70000, 70000, n, dtype=np.float32) for n in sizes]
    from_ = [on(device, v, DTYPES[source], shift) for v in values]
    to = [torch.zeros(n + shift, dtype=DTYPES[target], device=device)[shift:] for n in sizes]
    _C.copy_(to, from_, multiplier=factor)
    for t, f in zip(to, from_, strict=True):
        with np.errstate(over="ignore"):
            product = array(f) * np.float32(factor)
        assert_same(array(t), reference.store(product, target, saturating=False), "copy")


INF = math.inf
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Exponent bits and stored mantissa bits.
FIELDS = {F32: (8, 23), F16: (5, 10), BF16: (8, 7)}


def by_torch(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype)


def by_amp(values: Tensor, dtype: torch.dtype) -> Tensor:
    to = torch.empty_like(values, dtype=dtype)
    _C.copy_([to], [values])
    return to


Cast = Callable[[Tensor, torch.dtype], Tensor]
both = pytest.mark.parametrize("cast", [by_torch, by_amp])


def bits_of(value: float, dtype: torch.dtype) -> str:
    """Sign, exponent and mantissa in binary."""
    exponent, mantissa = FIELDS[dtype]
    size = 1 + exponent + mantissa
    kind = torch.int32 if size == 32 else torch.int16
    number = torch.tensor(value, dtype=dtype).view(kind).item()
    text = format(int(number) % 2**size, f"0{size}b")
    return f"{text[0]} {text[1 : 1 + exponent]} {text[1 + exponent :]}"


def above(value: float) -> float:
    """The next float32."""
    return float(np.nextafter(np.float32(value), np.float32(INF)))


def below(value: float) -> float:
    """The float32 before."""
    return float(np.nextafter(np.float32(value), np.float32(-INF)))


# The formats.


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_every_pattern_is_sign_exponent_and_mantissa_as_ieee_754_has_them(
    device: str, dtype: torch.dtype
) -> None:
    """(-1)^s 2^(e - bias) (1 + m / 2^k), with the first exponent subnormal, the last not finite."""
    exponent_bits, mantissa_bits = FIELDS[dtype]
    bias = 2 ** (exponent_bits - 1) - 1
    patterns = np.arange(1 << 16)
    sign = np.where(patterns >> 15, -1.0, 1.0)
    exponent = (patterns >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = (patterns & (2**mantissa_bits - 1)) / 2**mantissa_bits
    wanted = sign * np.where(
        exponent == 0,
        np.ldexp(mantissa, 1 - bias),
        np.ldexp(1 + mantissa, exponent - bias),
    )
    last = exponent == 2**exponent_bits - 1
    wanted[last] = np.where(mantissa == 0, sign * INF, math.nan)[last]
    stored = torch.from_numpy(patterns.astype(np.uint16).view(np.int16)).view(dtype).to(device)
    found = stored.double().cpu().numpy()
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found)[~last], np.signbit(wanted)[~last])


@pytest.mark.parametrize(
    ("dtype", "value", "wanted"),
    [
        (F32, 0.15625, "0 01111100 01000000000000000000000"),
        (F32, -118.625, "1 10000101 11011010100000000000000"),
        (F32, -0.0, "1 00000000 00000000000000000000000"),
        (F32, INF, "0 11111111 00000000000000000000000"),
        (F32, 2.0**-149, "0 00000000 00000000000000000000001"),
        (F32, 2.0**-126, "0 00000001 00000000000000000000000"),
        (F16, 0.15625, "0 01100 0100000000"),
        (F16, -118.625, "1 10101 1101101010"),
        (F16, 65504.0, "0 11110 1111111111"),
        (F16, -INF, "1 11111 0000000000"),
        (BF16, 0.15625, "0 01111100 0100000"),
        (BF16, -118.5, "1 10000101 1101101"),
        (BF16, INF, "0 11111111 0000000"),
    ],
)
def test_bit_patterns_of_the_textbook_numbers(
    dtype: torch.dtype, value: float, wanted: str
) -> None:
    assert bits_of(value, dtype) == wanted
    assert torch.empty(1, dtype=dtype).nbytes == len(wanted.replace(" ", "")) / 8


@pytest.mark.parametrize("dtype", FIELDS)
def test_one_hundredth_is_in_no_format(dtype: torch.dtype) -> None:
    """Binary fractions have powers of two below; 100 is none. The error is at most half a step."""
    found = Fraction(torch.tensor(0.01, dtype=dtype).item())
    step = Fraction(2) ** (math.floor(math.log2(0.01)) - FIELDS[dtype][1])
    assert 0 < abs(found - Fraction(1, 100)) <= step / 2


# The limits.

# Value, and what it becomes; the negatives likewise. T: a tie, which goes to the even neighbour.
EDGES: dict[torch.dtype, list[tuple[float, float]]] = {
    F16: [
        (65504.0, 65504.0),
        (below(65520.0), 65504.0),
        (65520.0, INF),  # T
        (2.0**-14, 2.0**-14),  # the smallest normal number
        (1023 * 2.0**-24, 1023 * 2.0**-24),  # the largest subnormal
        (2.0**-24, 2.0**-24),  # the smallest
        (above(2.0**-25), 2.0**-24),
        (2.0**-25, 0.0),  # T
        (2.0**-26, 0.0),
        (3 * 2.0**-25, 2.0**-23),  # T
        (below(3 * 2.0**-25), 2.0**-24),
        (1 + 2.0**-11, 1.0),  # T
        (above(1 + 2.0**-11), 1 + 2.0**-10),
    ],
    BF16: [
        ((2 - 2.0**-7) * 2.0**127, 3.3895313892515355e38),
        (below((2 - 2.0**-8) * 2.0**127), (2 - 2.0**-7) * 2.0**127),
        ((2 - 2.0**-8) * 2.0**127, INF),  # T
        (2.0**-126, 2.0**-126),
        (2.0**-133, 2.0**-133),
        (above(2.0**-134), 2.0**-133),
        (2.0**-134, 0.0),  # T
        (3 * 2.0**-134, 2.0**-132),  # T
        (1 + 2.0**-8, 1.0),  # T
        (above(1 + 2.0**-8), 1 + 2.0**-7),
    ],
}


@both
@pytest.mark.parametrize("dtype", EDGES)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_edges_of_the_range_exactly(
    device: str, cast: Cast, dtype: torch.dtype, sign: int
) -> None:
    values = torch.tensor([sign * value for value, _ in EDGES[dtype]], device=device)
    wanted = [sign * value for _, value in EDGES[dtype]]
    assert cast(values, dtype).tolist() == wanted


def test_float32_reaches_down_to_2_to_the_minus_149() -> None:
    exact = torch.tensor([2.0**127, 2.0**-126, 2.0**-149, 2.0**-150], dtype=torch.float64)
    assert exact.float().tolist() == [2.0**127, 2.0**-126, 2.0**-149, 0.0]


def test_float16_counts_to_2048() -> None:
    counted = torch.arange(2051).half().double()
    assert counted[:2049].tolist() == list(range(2049))
    assert counted[2049:].tolist() == [2048.0, 2050.0]


# The demonstrations.


def test_4096_halves_of_16_overflow_in_half_and_make_65536_in_float32(device: str) -> None:
    halves = torch.full((4096,), 16.0, dtype=F16, device=device)
    assert halves.sum().item() == INF
    assert halves.sum(dtype=torch.float32).item() == 65536.0


def test_4096_halves_of_16_added_one_by_one_stand_still_at_half_the_sum() -> None:
    """From 32768 on the step is 32, and 16 more is a tie that goes back."""
    total = torch.zeros((), dtype=F16)
    for _ in range(4096):
        total += 16.0
    assert total.item() == 32768.0


def test_1_plus_1e_minus_4_is_1_in_half(device: str) -> None:
    one, small = torch.tensor([1.0, 1e-4], dtype=F16, device=device)
    assert (one + small).item() == 1.0
    assert (one.float() + small.float()).item() > 1.0


# What is often told wrong.


def test_bfloat16_has_three_mantissa_bits_less_than_float16_and_not_five() -> None:
    assert math.log2(torch.finfo(BF16).eps / torch.finfo(F16).eps) == 3


def test_bfloat16_arithmetic_keeps_subnormals(device: str) -> None:
    smallest = torch.tensor([2.0**-126, 2.0**-133], dtype=BF16, device=device)
    assert (smallest * 0.5).tolist() == [2.0**-127, 0.0]  # 2^-134 is a tie, to even
    assert (smallest + smallest).tolist() == [2.0**-125, 2.0**-132]


@both
def test_1_5e_minus_7_in_half_is_1_788e_minus_7(device: str, cast: Cast) -> None:
    found = cast(torch.tensor([1.5e-7], device=device), F16).item()
    assert found == 3 * 2.0**-24
    assert found == pytest.approx(1.788e-7, rel=1e-3)
