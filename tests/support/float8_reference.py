"""Weights as float8 in NumPy, by the rule: integers and exact fractions, nothing of amp_mp."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FORMS = ("float8_128x128", "float8_128x128_power", "mxfp8")
# What the codes 0 to 0x7E stand for, times 2^9: integers.
MAGNITUDES = np.array(
    [c if c < 8 else (8 + c % 8) << (c // 8 - 1) for c in range(0x7F)], dtype=np.int64
)
# Half way between two codes, times 2^10.
MIDDLES = MAGNITUDES[:-1] + MAGNITUDES[1:]


def blocks_of(form: str) -> tuple[int, int]:
    """Rows and columns of a block."""
    return (1, 32) if form == "mxfp8" else (128, 128)


def float8(
    weight: NDArray[np.float32], form: str
) -> tuple[NDArray[np.uint8], NDArray[np.float32] | NDArray[np.uint8]]:
    """Codes and scales of [..., out, in]."""
    rows, columns = blocks_of(form)
    *matrices, out, width = weight.shape
    finite = np.isfinite(weight)
    magnitude = np.where(finite, np.abs(weight), np.float32(0))
    codes = np.empty(weight.shape, np.uint8)
    grid = (*matrices, -(-out // rows), -(-width // columns))
    scales = np.empty(grid, np.float32 if form == "float8_128x128" else np.uint8)
    for *m, r, c in np.ndindex(grid):
        part = (*m, slice(r * rows, (r + 1) * rows), slice(c * columns, (c + 1) * columns))
        scale = max(magnitude[part].max() / np.float32(448), np.float32(2.0**-126))
        if form == "float8_128x128":
            scales[(*m, r, c)] = scale
        else:
            bits = int(scale.view(np.uint32))
            exponent = (bits >> 23) + (bits & 0x7FFFFF != 0)
            scales[(*m, r, c)] = exponent
            scale = np.float32(2.0 ** (exponent - 127))
        # A float32 quotient times 2^10 is exact in float64; so is a comparison with integers.
        quotient = (magnitude[part] / scale).astype(np.float64) * 1024
        code = np.searchsorted(MIDDLES, quotient, side="left")
        tie = MIDDLES[np.minimum(code, 0x7D)] == quotient
        codes[part] = np.where(tie & (code % 2 == 1), code + 1, code)
    codes[~finite] = 0x7F
    return codes | (np.signbit(weight).astype(np.uint8) << 7), scales


def numpy_of(value: Tensor) -> NDArray[np.uint8 | np.float32]:
    """A tensor as NumPy has it, codes as bytes."""
    plain = value.detach().cpu()
    plain = plain.view(torch.uint8) if plain.dtype == torch.float8_e4m3fn else plain
    return plain.numpy()
