"""What the compact formats are, in NumPy: values in two parts, in groups, and by random bits.

Knows nothing of amp_mp. What rounds is defined on real numbers, or where a format is about the
integers that floats are in order of, on these. A format's arrays are unsigned or signed integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from reference import F32, FORMATS, FloatFormat, Floats, saturate

Bytes = NDArray[np.uint8]
Bits = NDArray[Any]

GROUP = 32
UE8M8 = FloatFormat(8, -126, 127)  # bfloat16's range, one more bit of mantissa for the sign


# Random bits: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), section 4.1.


def philox(counter: Sequence[Any], key: Sequence[int]) -> list[NDArray[np.uint64]]:
    """Philox4x32-10: four words for each counter of four words."""
    low = np.uint64(0xFFFFFFFF)
    c = [np.asarray(word, np.uint64) for word in counter]
    k = [int(word) for word in key]
    for _ in range(10):
        p, q = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        high_p, high_q = p >> np.uint64(32), q >> np.uint64(32)
        c = [high_q ^ c[1] ^ np.uint64(k[0]), q & low, high_p ^ c[3] ^ np.uint64(k[1]), p & low]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def stream(
    size: int, seed: int = 0, step: int = 0, number: int = 0, *, weights: bool = False
) -> Bytes:
    """A byte an element: byte e mod 16, the lowest of the first word first, of draw e / 16."""
    draws = np.arange(-(-size // 16), dtype=np.uint64)
    counter = [
        draws & np.uint64(0xFFFFFFFF),
        draws >> np.uint64(32) | np.uint64(weights << 31),
        number,
        step,
    ]
    words = philox(np.broadcast_arrays(*counter), (seed % 2**32, seed >> 32))
    return np.stack(words, axis=1).astype("<u4").reshape(-1).view(np.uint8)[:size]


def stochastic(x: Floats, format: FloatFormat, random: Bytes) -> Floats:
    """Up, away from zero, with the probability of what would be dropped, by 8 random bits."""
    with np.errstate(invalid="ignore", over="ignore"):
        wide = np.abs(x.astype(np.float64))
        _, exponent = np.frexp(wide)
        quantum = np.exp2(np.maximum(exponent - 1, format.min_exponent) - format.mantissa_bits)
        up = (random + 0.5) / 256
        steps = np.floor(wide / quantum + up)
        if format == FORMATS["float16"]:  # a float's sum where it is subnormal
            sums = (wide / quantum).astype(F32) + up.astype(F32)
            steps = np.where(wide < 2.0**format.min_exponent, np.floor(sums), steps)
        rounded = np.where(steps * quantum > format.largest, np.inf, steps * quantum)
        return np.copysign(np.where(np.isfinite(x), rounded, wide), x).astype(F32)


# In groups


def cube_root(n: Floats) -> Floats:
    """n y^2, y near |n|^(-1/3) by its bits, times a parabola in |n| y^3; in floats."""
    with np.errstate(all="ignore"):
        third = np.abs(n).view(np.int32).astype(F32) * (F32(1) / F32(3))
        y = (np.uint32(0x54638000) - third.astype(np.int32).view(np.uint32)).view(F32)
        near = n * (y * y)
        c = np.abs(near) * y
        return near * (F32(4.370848) + c * (c * F32(8.276604) - F32(9.632071)))


def _encode_m8(x: Floats, random: Bytes) -> tuple[Bits, Bits]:
    """The scale is the largest magnitude rounded up, a code 256ths of a root and a random byte."""
    groups = x.reshape(-1, GROUP)
    most = np.abs(groups).max(axis=1, initial=0)  # a NaN if there is one
    most = np.where(most < F32(2.0**-80), F32(0), most)
    upper = ((most.view(np.uint32).astype(np.int64) + 0xFFFF) >> 16).astype(np.uint16)
    scales = np.where(np.isnan(most), np.uint16(0x7FC0), upper)
    with np.errstate(all="ignore"):
        scale = _bfloat16(scales)
        inverse = np.where(scale == 0, F32(0), F32((127 * 256) ** 3) / scale)
        root = cube_root((groups * inverse[:, None]).reshape(-1))
    fixed = np.rint(np.where(np.isnan(root), F32(0), root))
    return np.floor((fixed + random) / 256).astype(np.int8), scales


def _decode_m8(codes: Bits, scales: Bits) -> Floats:
    q = codes.astype(F32)
    with np.errstate(invalid="ignore"):
        return q * q * q * np.repeat(_bfloat16(scales) * F32(4.8818978e-07), GROUP)


# In two parts

REST_BITS = {"split32": 16, "split24": 8}
STEP_BITS = {"split32": 26, "split24": 18}


def _encode_split_bfloat16(x: Floats, bits: int) -> tuple[Bits, Bits]:
    """On the line of the integers |x| is: the nearest multiples of 2^16, and of 2^(16 - bits)."""
    u = np.where(np.isnan(x), F32(np.nan), x).view(np.uint32).astype(np.int64)
    sign, line = u >> 31, u & 0x7FFFFFFF
    fine = 1 << (16 - bits)
    line = (2 * line + fine) // (2 * fine)  # ties away, in units of `fine`
    whole = 1 << bits
    weight = (2 * line + whole) // (2 * whole)
    rest = line - weight * whole
    return (sign << 15 | weight).astype(np.uint16), rest.astype(f"i{bits // 8}")


def _decode_split_bfloat16(weight: Bits, rest: Bits, bits: int) -> Floats:
    """The place on the line, but the weight alone where that is no place or no finite weight."""
    sign, upper = weight.astype(np.int64) >> 15, weight.astype(np.int64) & 0x7FFF
    line = (upper << 16) + (rest.astype(np.int64) << (16 - bits))
    line = np.where((line < 0) | (upper >= 0x7F80), upper << 16, line)
    return (sign << 31 | line).astype(np.uint32).view(F32)


def _float16_step(weight: NDArray[np.float64], name: str) -> NDArray[np.float64]:
    magnitude = np.clip(np.where(np.isfinite(weight), np.abs(weight), np.inf), 2.0**-14, 2.0**15)
    return np.exp2(np.frexp(magnitude)[1] - 1 - STEP_BITS[name])


def _encode_split_float16(x: Floats, name: str) -> tuple[Bits, Bits]:
    x = saturate(x)
    weight = FORMATS["float16"].round(x)
    largest = 2 ** (REST_BITS[name] - 1) - 1
    steps = np.rint((x - weight) / _float16_step(weight, name))
    rest = np.where(np.isnan(steps), largest, np.clip(steps, -largest, largest))
    return _float16_bits(weight), rest.astype(f"i{REST_BITS[name] // 8}")


def _decode_split_float16(weight: Bits, rest: Bits, name: str) -> Floats:
    wide = weight.view(np.float16).astype(np.float64)
    return (wide + rest * _float16_step(wide, name)).astype(F32)


# All of them


def _bfloat16(bits: Bits) -> Floats:
    return (bits.astype(np.uint32) << 16).view(F32)


def _bfloat16_bits(x: NDArray[Any]) -> Bits:
    upper = x.astype(F32).view(np.uint32) >> 16
    return np.where(np.isnan(x), 0x7FC0, upper).astype(np.uint16)


def _float16_bits(x: NDArray[Any]) -> Bits:
    return np.where(np.isnan(x), np.float16(np.nan), x.astype(np.float16)).view(np.uint16)


def encode(x: Floats, format: str, random: Bytes | None = None, weight: str = "") -> list[Bits]:
    """A format's arrays; `weight` is what the first part of a split is."""
    if format in REST_BITS:
        if weight == "bfloat16":
            return [*_encode_split_bfloat16(x, REST_BITS[format])]
        return [*_encode_split_float16(x, format)]
    if format == "float16":
        return [_float16_bits(FORMATS["float16"].round(saturate(x)))]
    if format == "float16_root":
        with np.errstate(invalid="ignore"):
            return encode(np.sqrt(x), "float16")
    assert random is not None, format
    if format == "m8":
        return [*_encode_m8(x, random)]
    if format == "ue8m8":
        rounded = stochastic(np.where(np.signbit(x), F32(np.nan), x), UE8M8, random)
        bits = np.where(np.isnan(rounded), 0xFF80, rounded.view(np.uint32) >> 15)
        return [bits.astype(np.uint16)]
    if format == "float16_stochastic":
        return [_float16_bits(stochastic(saturate(x), FORMATS["float16"], random))]
    return [_bfloat16_bits(stochastic(x, FORMATS["bfloat16"], random))]


def decode(parts: Sequence[Bits], format: str, weight: str = "") -> Floats:
    """The numbers that the arrays hold."""
    if format in REST_BITS:
        if weight == "bfloat16":
            return _decode_split_bfloat16(parts[0], parts[1], REST_BITS[format])
        return _decode_split_float16(parts[0], parts[1], format)
    if format == "m8":
        return _decode_m8(parts[0], parts[1])
    if format == "ue8m8":
        return (parts[0].astype(np.uint32) << 15).view(F32)
    if format.startswith("bfloat16"):
        return _bfloat16(parts[0])
    value = parts[0].view(np.float16).astype(F32)
    return value * value if format == "float16_root" else value
