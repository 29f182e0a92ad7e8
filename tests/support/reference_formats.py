"""What the compact formats are, in NumPy: values in two parts, in groups, and by random bits.

Knows nothing of amp_mp. What rounds is defined on real numbers, or where a format is about the
integers that floats are in order of, on these. A format's arrays are unsigned or signed integers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from reference import F32, FORMATS, FloatFormat, Floats, saturate, store

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


@functools.lru_cache(512)  # many tests draw for the same sizes and steps
def stream(
    size: int, seed: int = 0, step: int = 0, number: int = 0, *, weights: bool = False
) -> Bytes:
    """A byte for each element, one drawn byte for four elements of a block of 256.

    Byte b of the draws, the lowest of the first word first, is for element b mod 64 of block b / 64
    and for those 64, 128 and 192 behind it, which add as much to it, modulo 256.
    """
    draws = np.arange(-(-size // 256) * 4, dtype=np.uint64)
    counter = [
        draws & np.uint64(0xFFFFFFFF),
        draws >> np.uint64(32) | np.uint64(weights << 31),
        number,
        step,
    ]
    words = philox(np.broadcast_arrays(*counter), (seed % 2**32, seed >> 32))
    drawn = np.stack(words, axis=1).astype("<u4").reshape(-1).view(np.uint8)
    blocks = drawn.reshape(-1, 1, 64) + np.array([0, 64, 128, 192], np.uint8)[:, None]
    found = blocks.astype(np.uint8).reshape(-1)[:size]
    found.flags.writeable = False
    return found


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


def _scales_of_moments(groups: Floats) -> Bits:
    """The largest magnitude rounded up to a bfloat16, and 2^-76 at least; NaN if it is not finite.

    One above the largest bfloat16 has no such scale, and counts as infinite.
    """
    most = np.abs(groups).max(axis=1, initial=0)  # a NaN if there is one
    upper = (most.view(np.uint32).astype(np.int64) + 0xFFFF) >> 16
    upper = np.maximum(upper, _bfloat16_bits(np.array(2.0**-76)))
    return np.where((upper >= 0x7F80) | np.isnan(most), 0x7FC0, upper).astype(np.uint16)


def _encode_m8(x: Floats, random: Bytes) -> tuple[Bits, Bits]:
    """A third of a float's bits, as far below 127 * 256's as a third below the scale's is."""
    groups = x.reshape(-1, GROUP)
    scales = _scales_of_moments(groups)
    third = F32(1) / F32(3)
    largest = np.array(127 * 256, F32).view(np.int32).astype(F32)
    offset = largest - (scales.astype(np.int32) << 16).astype(F32) * third
    bits = np.abs(groups).view(np.int32).astype(F32) * third + offset[:, None]
    with np.errstate(invalid="ignore"):
        root = np.copysign(bits.astype(np.int32).view(F32), groups).reshape(-1)
        fixed = np.rint(root).astype(np.int64)
    codes = (fixed + random) >> 8
    return np.where((scales == 0x7FC0).repeat(GROUP), 0, codes).astype(np.int8), scales


def _decode_m8(codes: Bits, scales: Bits) -> Floats:
    """Three times as far below the scale's bits as the code is below 127's."""
    q = np.abs(codes.astype(np.int64)).astype(F32).view(np.uint32).astype(np.int64)
    below = 3 * (int(np.array(127, F32).view(np.uint32)) - q)
    scale = np.repeat(scales.astype(np.int64) << 16, GROUP)
    bits = np.where(codes == 0, 0, scale - below) % 2**32
    value = np.copysign(bits.astype(np.uint32).view(F32), codes)
    return np.where(np.isnan(_bfloat16(scales)).repeat(GROUP), F32(np.nan), value).astype(F32)


def _encode_i8(x: Floats, random: Bytes) -> tuple[Bits, Bits]:
    """127 equal steps from 0 to m8's scale; the number to the nearest 256th of a step."""
    groups = x.reshape(-1, GROUP)
    scales = _scales_of_moments(groups)
    inverse = F32(127 * 256) / _bfloat16(scales)
    with np.errstate(invalid="ignore"):
        fixed = np.rint(groups * inverse[:, None]).astype(np.int64).reshape(-1)
    codes = (fixed + random) >> 8
    return np.where((scales == 0x7FC0).repeat(GROUP), 0, codes).astype(np.int8), scales


def _decode_i8(codes: Bits, scales: Bits) -> Floats:
    """The code by 127, rounded, times the scale."""
    return codes.astype(F32) * (F32(1) / F32(127)) * _bfloat16(scales).repeat(GROUP)


# The pieces of log8, below the scale: powers of two, steps in each, code of the first step.
LOG8_PIECES = [(range(-6, 0), 16, 160), (range(-26, -6), 8, 0)]


def _encode_log8(x: Floats, random: Bytes) -> tuple[Bits, Bits]:
    """Straight lines between powers of two, to the nearest 256th of a code; below all is code 0."""
    groups = x.reshape(-1, GROUP).astype(np.float64)
    most = groups.max(axis=1, initial=0)
    with np.errstate(invalid="ignore"):
        bad = ~(most < 31 / 32 * 2.0**128) | np.signbit(groups).any(axis=1)
        _, exponent = np.frexp(most * 32 / 31)  # the power of two above it
        exponent = np.where(most == 0, -97, exponent)
    scales = np.where(bad, 1, np.clip(exponent + 127, 30, 255)).astype(np.uint8)
    with np.errstate(invalid="ignore"):
        part = groups / np.exp2(scales.astype(np.float64) - 127)[:, None]
        fraction, power = np.frexp(part)
        fixed = np.zeros(groups.shape, np.int64)
        for powers, steps, first in LOG8_PIECES:
            code = first + steps * (power - 1 - powers[0] + 2 * fraction - 1)
            inside = np.isin(power - 1, powers) & (part > 0)
            fixed[inside] = np.floor(256 * code[inside] + 0.5).astype(np.int64)
    codes = (fixed.reshape(-1) + random) >> 8
    return np.where(bad.repeat(GROUP), 0, codes).astype(np.uint8), scales


def log8_levels() -> NDArray[np.float64]:
    """The numbers of the codes 0 to 255, as parts of the scale."""
    pieces = [
        [2.0**power * (1 + step / steps) for power in powers for step in range(steps)]
        for powers, steps, _ in reversed(LOG8_PIECES)
    ]
    return np.concatenate(pieces)


def _decode_log8(codes: Bits, scales: Bits) -> Floats:
    """Scale 0 is a group that nothing was stored in yet, 1 one that could not be stored."""
    scale = np.repeat(np.exp2(scales.astype(np.float64) - 127), GROUP)
    value = log8_levels()[codes] * scale
    kinds = scales.repeat(GROUP)
    return np.where(kinds == 1, np.nan, np.where(kinds == 0, 0, value)).astype(F32)


# In two parts

REMAINDER_BITS = {"split32": 16, "split24": 8, "split20": 4}
STEP_BITS = {"split32": 26, "split24": 18}


def packed(nibbles: Bits) -> Bits:
    """Two signed numbers of 4 bits in a byte, the first of them in the low half."""
    low, high = nibbles.reshape(-1, 2).T & 15
    return (low | high << 4).astype(np.uint8)


def unpacked(pairs: Bits) -> Bits:
    """The numbers from -8 to 7 that `packed` made bytes of."""
    halves = np.stack([pairs & 15, pairs >> 4], axis=1).astype(np.int8).reshape(-1)
    return (halves ^ 8) - 8


def _encode_split_bfloat16(x: Floats, bits: int, random: Bytes | None) -> tuple[Bits, Bits]:
    """On the line of the integers |x| is: in units of 2^(16 - bits), and the nearest of 2^16.

    To the nearest unit without random bytes, ties away from zero; with them up or down.
    """
    u = np.where(np.isnan(x), F32(np.nan), x).view(np.uint32).astype(np.int64)
    sign, line = u >> 31, u & 0x7FFFFFFF
    unit, up = 1 << (16 - bits), 256 if random is None else 2 * random.astype(np.int64) + 1
    line = (512 * line + up * unit) // (512 * unit)
    whole = 1 << bits
    weight = (2 * line + whole) // (2 * whole)
    return (sign << 15 | weight).astype(np.uint16), line - weight * whole


def _decode_split_bfloat16(weight: Bits, remainder: Bits, bits: int) -> Floats:
    """The place on the line, but the weight alone where it is 0 or not finite."""
    sign, upper = weight.astype(np.int64) >> 15, weight.astype(np.int64) & 0x7FFF
    line = (upper << 16) + (remainder.astype(np.int64) << (16 - bits))
    line = np.where((upper == 0) | (upper >= 0x7F80), upper << 16, line)
    return (sign << 31 | line).astype(np.uint32).view(F32)


def _float16_step(weight: NDArray[np.float64], name: str) -> NDArray[np.float64]:
    magnitude = np.clip(np.where(np.isfinite(weight), np.abs(weight), np.inf), 2.0**-14, 2.0**15)
    return np.exp2(np.frexp(magnitude)[1] - 1 - STEP_BITS[name])


def _encode_split_float16(x: Floats, name: str) -> tuple[Bits, Bits]:
    x = saturate(x)
    weight = FORMATS["float16"].round(x)
    largest = 2 ** (REMAINDER_BITS[name] - 1) - 1
    steps = np.rint((x - weight) / _float16_step(weight, name))
    remainder = np.where(np.isnan(steps), largest, np.clip(steps, -largest, largest))
    return _float16_bits(weight), remainder.astype(f"i{REMAINDER_BITS[name] // 8}")


def _decode_split_float16(weight: Bits, remainder: Bits, name: str) -> Floats:
    """Whole steps from the weight on; a weight of 0 alone, with its sign."""
    wide = weight.view(np.float16).astype(np.float64)
    return np.where(wide == 0, wide, wide + remainder * _float16_step(wide, name)).astype(F32)


def float16_average(weight: Bits, remainder: Bits) -> Floats:
    """What an averaging pass goes on from: nobody writes an average, so 0 has its steps too."""
    wide = weight.view(np.float16).astype(np.float64)
    return (wide + remainder * _float16_step(wide, "split32")).astype(F32)


# All of them


def _bfloat16(bits: Bits) -> Floats:
    return (bits.astype(np.uint32) << 16).view(F32)


def _bfloat16_bits(x: NDArray[Any]) -> Bits:
    upper = x.astype(F32).view(np.uint32) >> 16
    return np.where(np.isnan(x), 0x7FC0, upper).astype(np.uint16)


def _float16_bits(x: NDArray[Any]) -> Bits:
    return np.where(np.isnan(x), np.float16(np.nan), x.astype(np.float16)).view(np.uint16)


def weight_bits(weight: Floats, dtype: str) -> Bits:
    """The bits of numbers that a low-precision dtype holds."""
    return _float16_bits(weight) if dtype == "float16" else _bfloat16_bits(weight)


GROUPED = {
    "m8": (_encode_m8, _decode_m8),
    "i8": (_encode_i8, _decode_i8),
    "log8": (_encode_log8, _decode_log8),
}


def encode(x: Floats, format: str, random: Bytes | None = None, weight: str = "") -> list[Bits]:
    """A format's arrays; `weight` is what the first part of a split is."""
    if format in STEP_BITS:
        if weight == "float16":
            return [*_encode_split_float16(x, format)]
        bits = REMAINDER_BITS[format]
        upper, remainder = _encode_split_bfloat16(x, bits, None)
        return [upper, remainder.astype(f"i{bits // 8}")]
    if format == "float16":
        return [_float16_bits(FORMATS["float16"].round(saturate(x)))]
    if format == "float16_root":
        with np.errstate(invalid="ignore"):
            return encode(np.sqrt(x), "float16")
    assert random is not None, format
    if format == "split20":
        assert weight == "bfloat16", weight
        upper, remainder = _encode_split_bfloat16(x, REMAINDER_BITS[format], random)
        return [upper, packed(remainder)]
    if format in GROUPED:
        return [*GROUPED[format][0](x, random)]
    if format == "ue8m8":
        rounded = stochastic(np.where(np.signbit(x), F32(np.nan), x), UE8M8, random)
        bits = np.where(np.isnan(rounded), 0xFF80, rounded.view(np.uint32) >> 15)
        return [bits.astype(np.uint16)]
    if format == "float16_stochastic":
        return [_float16_bits(stochastic(saturate(x), FORMATS["float16"], random))]
    return [_bfloat16_bits(stochastic(x, FORMATS["bfloat16"], random))]


def decode(parts: Sequence[Bits], format: str, weight: str = "") -> Floats:
    """The numbers that the arrays hold."""
    if format in REMAINDER_BITS:
        if weight == "bfloat16":
            remainder = parts[1]
            if format == "split20":
                remainder = unpacked(remainder).reshape(parts[0].shape)
            return _decode_split_bfloat16(parts[0], remainder, REMAINDER_BITS[format])
        return _decode_split_float16(parts[0], parts[1], format)
    if format in GROUPED:
        return GROUPED[format][1](parts[0], parts[1])
    if format == "ue8m8":
        return (parts[0].astype(np.uint32) << 15).view(F32)
    if format.startswith("bfloat16"):
        return _bfloat16(parts[0])
    value = parts[0].view(np.float16).astype(F32)
    return value * value if format == "float16_root" else value


def nearest(values: Floats, format: str, dtype: str) -> list[Bits]:
    """What is stored outside of a step, where split20 draws no random bits: split32's, rounded."""
    if format != "split20":
        return encode(values, format, weight=dtype)
    weight, remainder = encode(values, "split32", weight=dtype)
    return [weight, _nibbles(remainder)]


def _nibbles(remainder: Bits) -> Bits:
    """split20's nearest to split32's remainders, beside the same weight."""
    return packed(np.clip((remainder.astype(np.int64) + 0x800) >> 12, -8, 7))


def beside(values: Floats, weight: Floats, format: str, dtype: str) -> Any:
    """What a master's format stores of values beside the weight that was rounded from them.

    Half way between two weights the formats round differently: where this one would round to the
    other weight, it stores what is nearest to the value and rounds to this one. Below a power of
    two a remainder beside float16 reaches the next weight.
    """
    if format == "float32":
        other = store(values, dtype, saturating=True)
        half = (other + weight) * F32(0.5)
        is_other = other.view(np.uint32) != weight.view(np.uint32)
        return np.where(is_other, np.nextafter(half, weight), values)
    if format == "split20":
        return _nibbles(beside(values, weight, "split32", dtype))
    bits, remainder = encode(values, format, weight=dtype)
    above, ends = bits.astype(np.int32) - weight_bits(weight, dtype), np.iinfo(remainder.dtype)
    kept = np.where(above == 0, remainder, 0)
    kept = np.where(above == 1, ends.max, np.where(above == -1, ends.min, kept))
    return kept.astype(remainder.dtype)
