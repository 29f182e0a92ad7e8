"""The formats of this project for Adam's two moments, in NumPy, written from their formulas.

A code stores a flat float32 array, whose length is a multiple of 256. `encode` takes a random byte
for each element and returns codes and scales; `decode` gives back float32 numbers. Inputs are
finite, and those of codes for sums of squares are not negative. docs/format_reference.md says what
infinite numbers and NaN become.

All arithmetic is on the bits of floats as 32-bit integers, or single operations in float32, so the
results are the same bits on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Array = NDArray[Any]
Stored = tuple[Array, Array | None]

F32, U32, I32 = np.float32, np.uint32, np.int32
GROUP = 32
BLOCK = 256  # four elements of a block share a random byte
SIGN, MAGNITUDE, INFINITY = 0x80000000, 0x7FFFFFFF, 0x7F800000
THIRD = F32(1) / F32(3)
# A float of a small number plus this has the number, rounded to an integer, in its lowest bits.
TO_INTEGER = F32(12582912)


@dataclass(frozen=True)
class Code:
    """How one moment is stored: its name, bytes per element, and the two functions."""

    name: str
    bytes: float
    encode: Callable[[Floats, Bytes], Stored]
    decode: Callable[[Array, Array | None], Floats]

    def stored(self, x: Floats, random: Bytes) -> Floats:
        """What comes back of x after it was stored."""
        return self.decode(*self.encode(x, random))


def random_bytes(source: np.random.Generator, count: int) -> Bytes:
    """A random byte for each element, as the optimizers use them.

    Elements e, e + 64, e + 128 and e + 192 of a block of 256 have the bytes b, b + 64, b + 128 and
    b + 192 (mod 256) of one draw b.
    """
    if count % BLOCK:
        raise ValueError(f"count must be a multiple of {BLOCK}, found {count}")
    drawn = source.integers(0, 256, (count // BLOCK, 1, 64), dtype=np.uint8)
    shifts = np.array([0, 64, 128, 192], np.uint8)[:, None]
    return (drawn + shifts).reshape(-1)


# ---- one element at a time -----------------------------------------------------------------------


def encode_bfloat16(x: Floats, random: Bytes) -> Stored:
    """The upper 16 bits after a random number has been added to the lower 16."""
    noise = random.astype(U32) << 8 | 0x80
    return ((x.view(U32) + noise) >> 16).astype(np.uint16), None


def decode_bfloat16(codes: Array, scales: Array | None = None) -> Floats:
    return (codes.astype(U32) << 16).view(F32)


def encode_ue8m8(x: Floats, random: Bytes) -> Stored:
    """As bfloat16, but the sign bit, which is 0, is a bit of mantissa instead."""
    noise = random.astype(U32) << 8 | 0x80
    return ((2 * x.view(U32) + noise) >> 16).astype(np.uint16), None


def decode_ue8m8(codes: Array, scales: Array | None = None) -> Floats:
    return (codes.astype(U32) << 15).view(F32)


# ---- m8: groups of 32, a byte each, and a bfloat16 scale -----------------------------------------

TOP = 0x46FE0000  # the bits of 127 * 256
TOP_CODE = 0x42FE0000  # the bits of 127
LEAST_SCALE = 51 << 23  # the bits of 2^-76: below, a code would be less than a float can hold


def _largest(bits: Array) -> Array:
    """The largest of each group; floats that are not negative are in the order of their bits."""
    return bits.reshape(-1, GROUP).max(axis=1)


def _by_group(x: Array) -> Array:
    return x.reshape(-1, GROUP)


def encode_m8(x: Floats, random: Bytes) -> Stored:
    """A third of a float's bits is about the bits of its cube root: that is the code.

    The scale is the largest magnitude, rounded up to a bfloat16. The bits of magnitude and scale
    are divided by 3 and subtracted, so that the scale itself becomes 127 * 256. A random byte and a
    shift by 8 bits round this to the code.
    """
    bits = x.view(U32)
    magnitude = np.minimum(bits & MAGNITUDE, INFINITY)
    scales = np.maximum((_largest(magnitude) + 0xFFFF) & 0xFFFF0000, LEAST_SCALE).astype(U32)
    offsets = F32(TOP) - scales.astype(F32) * THIRD
    third = _by_group(magnitude.astype(F32)) * THIRD + offsets[:, None]
    root = third.reshape(-1).astype(I32).view(U32) | (bits & SIGN)
    fixed = (root.view(F32) + TO_INTEGER).view(U32)
    codes = ((fixed + random) >> 8).astype(np.uint8).view(np.int8)
    return codes, (scales >> 16).astype(np.uint16)


def decode_m8(codes: Array, scales: Array | None) -> Floats:
    """The bits of the code as a float, times 3, moved so that 127 becomes the scale.

    Sums of 32-bit integers wrap around, so the sign bit comes out right by itself.
    """
    assert scales is not None
    bits = codes.astype(F32).view(U32)
    shift = (scales.astype(U32) << 16) - U32(3 * TOP_CODE & 0xFFFFFFFF)
    moved = (_by_group(3 * bits) + shift[:, None]).reshape(-1)
    return np.where(codes == 0, U32(0), moved).view(F32)


# ---- the cube: m8 as it was before ---------------------------------------------------------------


def encode_cube(x: Floats, random: Bytes) -> Stored:
    """A code q means scale (q / 127)^3. The cube root is n y^2 with y near |n|^(-1/3)."""
    most = _largest(x.view(U32) & MAGNITUDE)
    scales = np.where(most < 47 << 23, U32(0), (most + 0xFFFF) >> 16).astype(np.uint16)
    scale = decode_bfloat16(scales)
    inverse = np.where(
        scale == 0, F32(0), F32(34366164500480) / np.where(scale == 0, F32(1), scale)
    )
    n = (_by_group(x) * inverse[:, None]).reshape(-1)
    third = (n.view(U32) & MAGNITUDE).astype(F32) * THIRD
    y = (U32(0x54638000) - third.astype(U32)).view(F32)
    near = n * (y * y)
    c = np.abs(near) * y
    root = near * (F32(4.370848) + c * (c * F32(8.276604) - F32(9.632071)))
    fixed = (root + TO_INTEGER).view(U32)
    return ((fixed + random) >> 8).astype(np.uint8).view(np.int8), scales


def decode_cube(codes: Array, scales: Array | None) -> Floats:
    assert scales is not None
    q = codes.astype(F32)
    step = decode_bfloat16(scales) * F32(4.8818978e-07)  # scale / 127^3
    return (_by_group(q * q * q) * step[:, None]).reshape(-1)


# ---- log8: groups of 32, a byte each, and a byte of power-of-two scale ---------------------------

# Codes 160 to 255 are 6 binades of 16 steps, codes 0 to 159 are 20 binades of 8 steps below.
FINE_CODES = 160
FINE_START = 0x3C800000  # the bits of 2^-6, which is code 160
COARSE_START = 0x32800000  # the bits of 2^-26, which is code 0
LEAST_EXPONENT = 30


def encode_log8(x: Floats, random: Bytes) -> Stored:
    """The place on a logarithmic scale below 2^(e - 127), in 256ths of a code, and a random byte.

    The scale's byte e is the smallest for which the largest of the group is below 31/32 of it, so
    that no sum passes code 255. What is below the lowest code, 0 too, becomes the lowest code. The
    256ths are rounded to nearest: rounded down, they would make each store a few ten-thousandths
    too small, and with beta2 = .999 a sum of squares that is stored 1,000 times a fifth too small.
    """
    bits = x.view(U32)
    exponents = np.maximum(((_largest(bits) + (1 << 19)) >> 23) + 1, LEAST_EXPONENT)
    shift = (exponents.astype(I32) - 127) << 23
    place = (_by_group(bits.astype(I32)) - shift[:, None]).reshape(-1)
    fine = ((place - FINE_START + (1 << 10)) >> 11) + FINE_CODES * 256
    coarse = (place - COARSE_START + (1 << 11)) >> 12
    fixed = np.maximum(np.maximum(fine, coarse), 0)
    return ((fixed + random) >> 8).astype(np.uint8), exponents.astype(np.uint8)


def decode_log8(codes: Array, scales: Array | None) -> Floats:
    assert scales is not None
    wide = codes.astype(I32)
    fine = (wide << 19) + (FINE_START - (FINE_CODES << 19))
    coarse = (wide << 20) + COARSE_START
    shift = (scales.astype(I32) - 127) << 23
    return (_by_group(np.minimum(fine, coarse)) + shift[:, None]).reshape(-1).view(F32)


FLOAT32 = Code("float32", 4, lambda x, random: (x, None), lambda codes, scales: codes)
BFLOAT16 = Code("bfloat16", 2, encode_bfloat16, decode_bfloat16)
UE8M8 = Code("ue8m8", 2, encode_ue8m8, decode_ue8m8)
M8 = Code("m8", 1 + 2 / GROUP, encode_m8, decode_m8)
CUBE = Code("cube", 1 + 2 / GROUP, encode_cube, decode_cube)
LOG8 = Code("log8", 1 + 1 / GROUP, encode_log8, decode_log8)
