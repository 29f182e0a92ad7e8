"""Formats of other libraries for Adam's two moments, in NumPy, from their published formulas.

The libraries themselves are not run, so that no GPU is needed. All of them round to nearest: the
random bytes are not used. Read in these versions:

- FlashOptim 0.1.3 (commit 8b2d966), and "FlashOptim: Optimizers for Memory Efficient Training",
  arXiv 2602.23349: `_triton_adam_kernel` in flashoptim/optimizers.py.
- bitsandbytes 0.50.2 (commit 95f9af3), and "8-bit Optimizers via Block-wise Quantization", arXiv
  2110.02861: `create_dynamic_map` in bitsandbytes/functional.py and
  `kOptimizerStatic8bit2StateBlockwise` in csrc/kernels.cu. The paper has blocks of 2,048 elements,
  the library of 256.
- torchao 0.19.0 (commit 36027d8): torchao/optim/quant_utils.py, subclass_8bit.py, subclass_4bit.py
  (its formats follow "Memory Efficient Optimizers with 4-bit States", arXiv 2309.01507) and
  subclass_fp8.py.
"""

from __future__ import annotations

import numpy as np
from moment_codes import F32, Array, Bytes, Code, Floats, Stored

# ---- FlashOptim: groups of 32 and a float16 scale ------------------------------------------------

FLASH_GROUP = 32
FLASH_LEAST = F32(1e-12)


def encode_flash_moment(x: Floats, random: Bytes) -> Stored:
    """n = x / scale is companded to 2n / (1 + |n|) and rounded to 127ths."""
    groups = x.reshape(-1, FLASH_GROUP)
    scales = np.maximum(np.abs(groups).max(axis=1), FLASH_LEAST)
    n = groups / scales[:, None]
    companded = F32(2) * n / (F32(1) + np.abs(n))
    codes = np.floor(companded * F32(127) + F32(0.5)).astype(np.int8)
    return codes.reshape(-1), scales.astype(np.float16)


def decode_flash_moment(codes: Array, scales: Array | None) -> Floats:
    assert scales is not None
    companded = codes.reshape(-1, FLASH_GROUP).astype(F32) / F32(127)
    n = companded / (F32(2) - np.abs(companded))
    return (n * scales.astype(F32)[:, None]).reshape(-1)


def encode_flash_variance(x: Floats, random: Bytes) -> Stored:
    """The square root, divided by the largest of its group, in 255ths."""
    roots = np.sqrt(x).reshape(-1, FLASH_GROUP)
    scales = np.maximum(roots.max(axis=1), FLASH_LEAST)
    codes = np.floor(roots / scales[:, None] * F32(255) + F32(0.5)).astype(np.uint8)
    return codes.reshape(-1), scales.astype(np.float16)


def decode_flash_variance(codes: Array, scales: Array | None) -> Floats:
    assert scales is not None
    n = codes.reshape(-1, FLASH_GROUP).astype(F32) / F32(255)
    roots = n * scales.astype(F32)[:, None]
    return (roots * roots).reshape(-1)


FLASH_MOMENT = Code("2n/(1+|n|)", 1 + 2 / FLASH_GROUP, encode_flash_moment, decode_flash_moment)
FLASH_VARIANCE = Code(
    "linear root", 1 + 2 / FLASH_GROUP, encode_flash_variance, decode_flash_variance
)

# ---- tables of levels: bitsandbytes and torchao, blocks and a float32 scale ----------------------


def dynamic_map(signed: bool, exponents: int, bits: int) -> Floats:
    """Decades of levels, each with twice as many as the next smaller one, and 0 and 1.

    The levels of a decade are the midpoints of equal parts of 0.1 to 1, times a power of ten.
    """
    levels = [0.0, 1.0]
    for decade in range(exponents):
        parts = 2 ** (decade + bits - 1 - exponents) * (1 if signed else 2)
        edges = np.linspace(0.1, 1, parts + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - exponents + 1)
        levels += [*middles, *(-middles if signed else [])]
    return np.array(sorted(levels), F32)


def e4m3() -> Floats:
    """The numbers of torch.float8_e4m3fn: up to 448, steps of 2^-9 at the bottom."""
    low = np.arange(8) * 2.0**-9
    high = [(1 + part / 8) * 2.0**power for power in range(-6, 9) for part in range(8)]
    positive = np.array([*low[1:], *high[:-1]])  # the last place holds NaN
    return np.array([*-positive[::-1], 0.0, *positive], F32)


def table(
    name: str, levels: Floats, block: int, bits: int = 8, *, least: float, keep_sign: bool = False
) -> Code:
    """The nearest of some levels, times the largest magnitude of a block over the largest level.

    A code is the place of its level in the sorted list.

    Args:
        name, bits: of the code.
        levels: sorted.
        block: elements that share a scale of 4 bytes.
        least: a smaller largest magnitude counts as this.
        keep_sign: a negative number whose nearest level is 0 gets the level below.
    """
    borders = (levels[:-1] + levels[1:]) / F32(2)

    def encode(x: Floats, random: Bytes) -> Stored:
        blocks = x.reshape(-1, block)
        scales = np.maximum(np.abs(blocks).max(axis=1), F32(least)) / levels[-1]
        n = (blocks / scales[:, None]).reshape(-1)
        codes = np.searchsorted(borders, n, side="right")
        if keep_sign:
            codes -= (levels[codes] == 0) & (n < 0)
        return codes.astype(np.uint8), scales

    def decode(codes: Array, scales: Array | None) -> Floats:
        assert scales is not None
        return (levels[codes].reshape(-1, block) * scales[:, None]).reshape(-1)

    return Code(name, bits / 8 + 4 / block, encode, decode)


SIGNED, UNSIGNED = dynamic_map(True, 7, 8), dynamic_map(False, 7, 8)
SMALLEST_NORMAL = 2.0**-126  # bitsandbytes has no least scale; this only avoids 0 / 0

BNB_MOMENT = table("dynamic map", SIGNED, 256, least=SMALLEST_NORMAL, keep_sign=True)
BNB_VARIANCE = table("dynamic map", UNSIGNED, 256, least=SMALLEST_NORMAL)
AO8_MOMENT = table("dynamic map", SIGNED, 256, least=1e-12)
AO8_VARIANCE = table("dynamic map", UNSIGNED, 256, least=1e-12)
AO4_MOMENT = table("4-bit dynamic map", dynamic_map(True, 3, 4), 128, 4, least=1e-12)
AO4_VARIANCE = table(
    "4-bit linear, no zero", np.linspace(0, 1, 17, dtype=F32)[1:], 128, 4, least=1e-12
)
AO_FP8 = table("E4M3", e4m3(), 256, least=1e-12)
