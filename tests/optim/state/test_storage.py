"""Compact formats: what they can hold, bit for bit."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import reference
import reference_formats as formats
import torch
from helpers import DTYPES, RAGGED, array, assert_same, assert_same_bits, interesting_floats, random
from rules import (
    WITHOUT_ROWS,
    raw,
)
from torch import Tensor

import amp_mp as amp
from amp_mp import _C

SPLITS = ("split32", "split24", "split20")
LOW = ("bfloat16", "float16")
# Splits with the weights that they go beside.
BESIDE = [(s, w) for s in SPLITS for w in LOW if (s, w) != ("split20", "float16")]
CHUNK = 1 << 20
EXHAUSTIVE = os.environ.get("AMP_MP_EXHAUSTIVE") == "1"


def patterns() -> Iterator[np.ndarray]:
    """float32 numbers by strata, and 2^24 at random; AMP_MP_EXHAUSTIVE=1: all 2^32 there are."""
    if EXHAUSTIVE:
        for first in range(0, 1 << 32, CHUNK):
            yield (np.arange(CHUNK, dtype=np.uint32) + np.uint32(first)).view(np.float32)
        return
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    edges = [0, 1, 0x7F, 0x80, 0x81, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0x8001, 0x8080, 0xFF7F, 0xFF80]
    yield (upper[:, None] | np.array([*edges, 0xFFFF], np.uint32)).reshape(-1).view(np.float32)
    generator = np.random.default_rng(0)
    for _ in range(16):
        yield generator.integers(0, 1 << 32, CHUNK, np.uint32).view(np.float32)


def there_and_back(
    device: str, x: np.ndarray, format: str, weight: str = "bfloat16", **random: int
) -> tuple[Tensor, np.ndarray]:
    """The first array of the format, and the decoded numbers."""
    values = torch.from_numpy(x).to(device)
    parts = amp.formats.encode(values, format, weight_dtype=DTYPES[weight], **random)
    return parts[0], array(amp.formats.decode(parts, format))


# Masters in two parts.


def is_infinite(x: np.ndarray) -> np.ndarray:
    """Whether the nearest bfloat16 is infinite, ties rounded away from zero."""
    with np.errstate(invalid="ignore"):
        return np.abs(x.astype(np.float64)) >= 2.0**128 - 2.0**119


def test_split32_of_bfloat16_loses_nothing_but_what_rounds_to_0(device: str) -> None:
    for x in patterns():
        weight, found = there_and_back(device, x, "split32")
        x = np.where(is_infinite(x), np.copysign(np.float32(np.inf), x), x)
        x = np.where(np.abs(x) < np.float32(2.0**-134), np.copysign(np.float32(0), x), x)
        bits = np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32))
        assert_same_bits(found, bits.view(np.float32), device, "split32")
        assert np.array_equal(weight.isnan().cpu().numpy(), np.isnan(x))


def test_split24_of_bfloat16_is_within_a_512th_of_an_ulp(device: str) -> None:
    worst = 0.0
    for x in patterns():
        weight, found = there_and_back(device, x, "split24")
        assert np.array_equal(weight.isnan().cpu().numpy(), np.isnan(x))
        assert np.array_equal(np.isnan(found), np.isnan(x))
        assert np.array_equal(found[np.isinf(x)], x[np.isinf(x)])
        top = (x.view(np.uint32) & 0x7FFFFFFF) >= 0x7F7F7F80
        assert np.array_equal(np.isinf(found), top & ~np.isnan(x))
        finite = np.isfinite(x) & np.isfinite(found)
        wide = x[finite].astype(np.float64)
        wide[np.abs(wide) < 2.0**-134 * (1 - 1 / 256)] = 0  # weights of 0 are masters of 0
        ulp = np.exp2(np.maximum(np.frexp(wide)[1] - 1, -126) - 7)
        error = np.abs(found[finite] - wide) / ulp
        worst = max(worst, float(error.max(initial=0)))
    assert worst == 1 / 512


def test_split20_is_one_of_the_two_numbers_around_and_their_mean_is_right(device: str) -> None:
    """On the line of the integers that floats are, where two neighbours are 4,096 apart.

    The native code for the bytes of one step; the definition for all 256, whose mean is within
    1/512 of a step. At 0 and the infinities the weight counts alone.
    """
    for x in itertools.islice(patterns(), 3):
        bits = np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint32)
        line = (bits & 0x7FFFFFFF).astype(np.int64)
        _, found = there_and_back(device, x, "split20", seed=1, step=2)
        assert np.array_equal(np.signbit(found), (bits >> 31).astype(bool))
        off = (found.view(np.uint32) & 0x7FFFFFFF).astype(np.int64) - line
        inside = (line >= 0x8000 + 0x1000) & (line < 0x7F7F7000)
        assert (np.abs(off[inside]) < 4096).all()
        assert (found.view(np.uint32)[inside] % 4096 == 0).all()
        assert np.isin(found[line < 0x7000], [0]).all()
        assert np.array_equal(np.isnan(found), np.isnan(x))
        assert np.isinf(found[(line >= 0x7F7F8000) & (line <= 0x7F800000)]).all()
    sample = line[inside][:4096].astype(np.uint32).view(np.float32)
    total = np.zeros(sample.size, np.int64)
    for byte in range(256):
        parts = formats.encode(sample, "split20", np.full(sample.size, byte), "bfloat16")
        total += formats.decode(parts, "split20", "bfloat16").view(np.uint32).astype(np.int64)
    error = (total / 256 - line[inside][:4096]) / 4096
    assert np.abs(error).max() <= 1 / 512
    assert error.min() < 0 < error.max()


def test_what_split20_holds_stays_whatever_the_bytes(device: str) -> None:
    """All 2^20 numbers; the definition with all bytes, the native code with those of some steps."""
    x = (np.arange(1 << 20, dtype=np.uint32) << 12).view(np.float32)
    wanted = formats.decode(formats.nearest(x, "split20", "bfloat16"), "split20", "bfloat16")
    kept = (np.abs(x) >= np.float32(2.0**-134)) & ~is_infinite(x) & ~np.isnan(x)
    assert_same(wanted[kept], x[kept], "nearest")
    for byte in range(0, 256, 1 if EXHAUSTIVE else 51):
        parts = formats.encode(x, "split20", np.full(x.size, byte, np.uint8), "bfloat16")
        assert_same(formats.decode(parts, "split20", "bfloat16"), wanted, "definition")
    for step in range(32 if EXHAUSTIVE else 3):
        assert_same(there_and_back(device, x, "split20", step=step)[1], wanted, "native")


def second_array(remainders: np.ndarray, format: str) -> np.ndarray:
    """What lies beside the weights: the remainders, or two of them in a byte."""
    return formats.packed(remainders) if format == "split20" else remainders


def pairs(remainder_bits: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Weights and remainders: all of 4 and 8 bits; of 16 some, or with AMP_MP_EXHAUSTIVE=1 all."""
    weights = np.arange(1 << 16, dtype=np.uint16)
    remainders = np.arange(-(1 << remainder_bits - 1), 1 << remainder_bits - 1)
    if remainder_bits == 16 and not EXHAUSTIVE:
        remainders = np.concatenate(
            [remainders[:3], remainders[-3:], np.arange(-3, 4), remainders[::997]]
        )
    for part in np.array_split(remainders, -(-remainders.size // 64)):
        grid = np.broadcast_arrays(weights, part.astype(remainder_kind(remainder_bits))[:, None])
        yield grid[0].reshape(-1), grid[1].reshape(-1)


def remainder_kind(bits: int) -> np.dtype[Any]:
    """NumPy's dtype for remainders of so many bits."""
    return np.dtype(np.int16 if bits == 16 else np.int8)


@pytest.mark.parametrize(("format", "weight"), BESIDE)
def test_any_pair_is_within_one_unit_of_the_weight(device: str, format: str, weight: str) -> None:
    """Whatever a user writes into a weight, and whatever remainder lies beside it.

    A unit is the distance to the next weight towards zero, or of the two around zero.
    """
    for bits, remainders in pairs(formats.REMAINDER_BITS[format]):
        low = torch.from_numpy(bits.view(np.int16).copy()).view(DTYPES[weight]).to(device)
        plain = array(low)
        second = torch.from_numpy(second_array(remainders, format).copy()).to(device)
        found = array(amp.formats.decode((low, second), format))
        finite = np.isfinite(plain)
        assert np.array_equal(np.isnan(found), np.isnan(plain))
        assert np.array_equal(found[np.isinf(plain)], plain[np.isinf(plain)])
        below = torch.from_numpy((bits & 0x7FFF).astype(np.int16) - 1).clamp_(0)
        inner = array(below.view(DTYPES[weight]))
        tiny = np.float32(2.0**-133 if weight == "bfloat16" else 2.0**-24)
        unit = np.maximum(np.abs(plain[finite]).astype(np.float64) - inner[finite], tiny)
        assert (np.abs(found[finite].astype(np.float64) - plain[finite]) <= unit).all()


@pytest.mark.parametrize("format", ["split32", "split24"])
def test_splits_of_float16(device: str, format: str) -> None:
    """split32: exact from 2^-16 on, within 2^-40 below. split24: within a 256th of an ulp.

    What rounds to a weight of 0 is 0.
    """
    for x in patterns():
        weight, found = there_and_back(device, x, format, "float16")
        assert np.array_equal(weight.isnan().cpu().numpy(), np.isnan(x))
        assert np.array_equal(np.isnan(found), np.isnan(x))
        kept = ~np.isnan(x)
        wanted, found = np.clip(x[kept], -65504, 65504).astype(np.float64), found[kept]
        ulp = np.exp2(np.maximum(np.frexp(array(weight)[kept])[1] - 1, -14) - 10.0)
        zero = array(weight)[kept] == 0
        assert np.array_equal(found[zero], 0 * found[zero])
        assert (np.abs(wanted[zero]) <= 2.0**-25).all()
        wanted[zero] = 0
        error = np.abs(found - wanted)
        if format == "split24":
            assert (error <= ulp / 256).all()
            continue
        assert (error <= 2.0**-40).all()
        assert (error[np.abs(wanted) >= 2.0**-16] == 0).all()


@pytest.mark.parametrize(("format", "weight"), BESIDE)
def test_weights_that_no_step_has_written_are_read(device: str, format: str, weight: str) -> None:
    """All 65,536, with every kind of remainder: 0 and not finite stays so, and its sign."""
    bits = np.arange(1 << 16).astype(np.uint16)
    remainder_bits = formats.REMAINDER_BITS[format]
    most = (1 << remainder_bits - 1) - 1
    low = torch.from_numpy(bits.view(np.int16)).view(DTYPES[weight]).to(device)
    plain = array(low)
    for remainder in (0, 1, -1, most, -most, most // 3):
        remainders = np.full(bits.size, remainder, remainder_kind(remainder_bits))
        second = second_array(remainders, format)
        found = array(amp.formats.decode((low, torch.from_numpy(second).to(device)), format))
        assert np.array_equal(np.isnan(found), np.isnan(plain))
        same = np.isinf(plain) | (plain == 0) | (remainder == 0)
        assert np.array_equal(found[same], plain[same], equal_nan=True)
        assert np.array_equal(np.signbit(found[plain == 0]), np.signbit(plain[plain == 0]))
        with np.errstate(invalid="ignore"):
            assert_same(found, formats.decode([bits, second], format, weight), "decoded")


# Every format against the definition.

ENCODED = [
    *BESIDE,
    *((format, "bfloat16") for format in amp.formats.NAMES if format not in (*SPLITS, "float32")),
]


@pytest.mark.parametrize(("format", "weight"), ENCODED)
def test_encoding_equals_the_reference_bit_for_bit(device: str, format: str, weight: str) -> None:
    seed, step, number = 7 << 33 | 5, 9, 3
    inputs = [random(n, n, special=True) for n in RAGGED]
    inputs += [interesting_floats(), random(4096, 1, 1e-38), random(4096, 2, 1e30)]
    for values in inputs:
        whole = 2 if format == "split20" else 32 if format in WITHOUT_ROWS else 1
        values = values[: values.size // whole * whole]
        values = np.abs(values) if format in ("ue8m8", "log8", "float16_root") else values
        parts = amp.formats.encode(
            torch.from_numpy(values).to(device),
            format,
            weight_dtype=DTYPES[weight],
            seed=seed,
            step=step,
            number=number,
        )
        bits = formats.stream(values.size, seed, step, number, weights=format == "split20")
        with np.errstate(all="ignore"):
            wanted = formats.encode(values, format, bits, weight)
        numbers = formats.decode(wanted, format, weight)
        for part, want in zip(parts, wanted, strict=True):
            found = raw(part).view(want.dtype)
            if format in formats.GROUPED and want.size == values.size:  # codes of NaN mean nothing
                found, want = (np.where(np.isnan(numbers), 0, codes) for codes in (found, want))
            assert np.array_equal(found, want), values.size
        decoded = array(amp.formats.decode(parts, format))
        assert_same(decoded, numbers, format)


@pytest.mark.parametrize("format", amp.formats.NAMES)
def test_any_dense_layout_is_kept(device: str, format: str) -> None:
    x = torch.from_numpy(np.abs(random(64 * 96, 1))).to(device).view(64, 96)
    for values in (x.t(), x.view(4, 8, 24, 8).to(memory_format=torch.channels_last)):
        parts = amp.formats.encode(values, format)
        assert parts[0].shape == values.shape
        assert parts[0].stride() == values.stride()
        decoded = amp.formats.decode(parts, format)
        assert decoded.stride() == values.stride()
        # what lies side by side in memory is a group, and draws bits in this order
        flat = values.as_strided((values.numel(),), (1,))
        assert torch.equal(
            decoded.as_strided((values.numel(),), (1,)),
            amp.formats.decode(amp.formats.encode(flat, format), format),
        )


def test_philox_gives_the_published_numbers() -> None:
    """Random123's known answers for philox4x32 of 10 rounds."""
    ones = 2**32 - 1
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
    for counter, key, wanted in (
        ([0] * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([ones] * 4, (ones, ones), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (pi[:4], (pi[4], pi[5]), "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ):
        found = formats.philox(counter, key)
        assert " ".join(f"{int(word):08x}" for word in found) == wanted


def test_bytes_are_in_the_order_that_is_written_down() -> None:
    first = bytes.fromhex("d5e82766 8dc569e1 4cac57bc d8db009b")
    assert formats.stream(16).tobytes() == first
    streams = [formats.stream(64), formats.stream(64, weights=True)]
    streams += [formats.stream(64, seed=2**32), formats.stream(64, seed=1)]
    streams += [formats.stream(64, step=1), formats.stream(64, number=1)]
    assert len({s.tobytes() for s in streams}) == len(streams)


# Stochastic rounding.

# The kernels' name, and the format for numbers that fit, and of the mantissa.
STOCHASTIC = {
    "bfloat16_stochastic": reference.FORMATS["bfloat16"],
    "float16_stochastic": reference.FORMATS["float16"],
    "ue8m8": formats.UE8M8,
}


def stored(device: str, x: np.ndarray, native: str, **random: int) -> np.ndarray:
    data, remainder = _C.encode(torch.from_numpy(x).to(device), native, **random)
    return array(_C.decode(data, remainder, native))


@pytest.mark.parametrize("native", STOCHASTIC)
def test_what_fits_stays_whatever_the_bits(device: str, native: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = formats.decode([bits], native)
    if native == "float16_stochastic":
        values = reference.saturate(values)
    for step in range(32):
        assert set(formats.stream(1 << 16, step=step)) == set(range(256))
        assert_same(stored(device, values, native, step=step), values, native)


@pytest.mark.parametrize("native", STOCHASTIC)
def test_the_mean_over_steps_is_right(device: str, native: str) -> None:
    """Up with a probability of 256ths: at most 1/512 of an ulp beside the number.

    To it come five (the mean of all) or six (each) standard deviations, of an ulp / 2 a step.
    """
    steps, format = 400, STOCHASTIC[native]
    x = np.abs(random(4096, 1))
    x[:64] *= np.float32(1e-6)  # subnormal in float16
    mean = sum(stored(device, x, native, step=s).astype(np.float64) for s in range(steps)) / steps
    exponent = np.maximum(np.frexp(x)[1] - 1, format.min_exponent)
    error = (mean - x) / np.exp2(exponent - format.mantissa_bits)
    assert abs(error.mean()) <= 1 / 512 + 5 * 0.5 / np.sqrt(steps * x.size)
    assert np.abs(error).max() <= 1 / 512 + 6 * 0.5 / np.sqrt(steps)


# The functions for single tensors.


def api_errors() -> dict[str, tuple[Callable[[], Any], type, str]]:
    x = torch.zeros(33)
    weight, remainder = amp.formats.encode(x, "split32")
    return {
        "format": (
            lambda: amp.formats.encode(x, "int4"),
            ValueError,
            r"format must be one of split32, split24, split20, .*i8, .*ue8m8, log8; found 'int4'",
        ),
        "format of decode": (
            lambda: amp.formats.decode((x,), "fp8"),
            ValueError,
            "format must be one of .*; found 'fp8'",
        ),
        "dtype": (
            lambda: amp.formats.encode(x.double(), "ue8m8"),
            TypeError,
            "x must be float32, found torch.float64",
        ),
        "weight": (
            lambda: amp.formats.encode(x, "split24", weight_dtype=torch.float32),
            ValueError,
            "weight_dtype must be torch.float16 or torch.bfloat16, found torch.float32",
        ),
        "float16 beside 4 bits": (
            lambda: amp.formats.encode(x[:32], "split20", weight_dtype=torch.float16),
            ValueError,
            "weight_dtype must be torch.bfloat16.*found torch.float16",
        ),
        "half a byte": (
            lambda: amp.formats.encode(x, "split20"),
            ValueError,
            r"split20.*33 elements",
        ),
        "groups": (
            lambda: amp.formats.encode(x, "m8"),
            ValueError,
            r"m8 stores groups of 32; x has 33 elements, shape \(33,\)",
        ),
        "one array of groups": (
            lambda: amp.formats.decode((torch.zeros(32, dtype=torch.uint8),), "log8"),
            ValueError,
            r"log8 has 2 array\(s\), found 1",
        ),
        "one array": (
            lambda: amp.formats.decode((weight,), "split32"),
            ValueError,
            r"split32 has 2 array\(s\), found 1",
        ),
        "two arrays": (
            lambda: amp.formats.decode((weight, remainder), "bfloat16"),
            ValueError,
            r"bfloat16 has 1 array\(s\), found 2",
        ),
        "other remainder": (
            lambda: amp.formats.decode((weight, remainder), "split24"),
            ValueError,
            "split24 is a low-precision weight and a remainder, found dtypes torch.bfloat16 and "
            "torch.int16",
        ),
        "float32 weight": (
            lambda: amp.formats.decode((x, remainder), "split32"),
            ValueError,
            "found dtypes torch.float32 and torch.int16",
        ),
        "wrong width": (
            lambda: amp.formats.decode((torch.zeros(32),), "ue8m8"),
            ValueError,
            "data .*must be contiguous, 2 bytes an element",
        ),
        "too few scales": (
            lambda: amp.formats.decode(
                (torch.zeros(64, dtype=torch.int8), torch.zeros(1, dtype=torch.bfloat16)), "m8"
            ),
            ValueError,
            "second .*must have 2 elements of 2 bytes",
        ),
    }


@pytest.mark.parametrize("case", api_errors())
def test_what_is_no_format_is_refused_by_name(case: str) -> None:
    act, kind, message = api_errors()[case]
    with pytest.raises(kind, match=message):
        act()


def test_a_negative_zero_is_a_zero_in_ue8m8(device: str) -> None:
    parts = amp.formats.encode(torch.tensor([-0.0, 0.0], device=device), "ue8m8")
    assert amp.formats.decode(parts, "ue8m8").tolist() == [0.0, 0.0]
