"""m / (sqrt(v) + eps) of a step of AdamW, for numbers that a GPU's fast instructions find hard.

A GPU on which these fail needs a build with AMP_MP_PLAIN_QUOTIENT=1 (csrc/cuda/quotient.h).
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_same
from numpy.typing import NDArray

import amp_mp as amp

Floats = NDArray[np.float32]
SIGNIFICANDS = 1 << 24  # all of [1, 2) and of [2, 4): a root has both parities of the exponent
PART = 1 << 22
LATE = 400  # steps after which the corrections of both biases are 1
HALF = np.float32(0.5)


def quotients(device: str, m: Floats, v: Floats, eps: float) -> Floats:
    """What the fused step computes from these moments: its weights and gradients are 0."""
    param = torch.nn.Parameter(torch.zeros(len(m), device=device))
    optimizer = amp.optim.AdamW([param], lr=1.0, betas=(0.5, 0.5), eps=eps, weight_decay=0.0)
    state = {"step": torch.tensor(float(LATE))}
    # The betas halve both moments, which is exact for all but the smallest and infinite ones.
    state["exp_avg"], state["exp_avg_sq"] = torch.from_numpy(m), torch.from_numpy(v)
    saved = optimizer.state_dict()
    optimizer.load_state_dict({**saved, "state": {0: state}})
    param.grad = torch.zeros_like(param)
    optimizer.step()
    return -param.detach().cpu().numpy()


def expected(m: Floats, v: Floats, eps: float) -> Floats:
    with np.errstate(all="ignore"):
        quotient = (HALF * m) / (np.sqrt(HALF * v) + np.float32(eps))
        return -(np.float32(0) - quotient)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(SIGNIFICANDS // PART))
def test_every_significand_of_the_root_and_of_the_divisor(device: str, part: int) -> None:
    """Each of the 2^23 significands from 1 to 2 is some root, so each divisor is met, too."""
    bits = np.arange(part * PART, (part + 1) * PART, dtype=np.uint32) + np.uint32(0x40000000)
    v = bits.view(np.float32)  # 2 to 8, half of it 1 to 4
    rng = np.random.default_rng(part)
    for scale in (None, 1.0, 1e-6, 1e6):
        m = np.full(PART, 2, np.float32)
        if scale is not None:
            m = (rng.standard_normal(PART) * scale).astype(np.float32)
        assert_same(quotients(device, m, v, 0.0), expected(m, v, 0.0), f"m of {scale}")


def test_the_one_pair_that_two_steps_of_newton_miss(device: str) -> None:
    divisor = np.float32(2) - np.float32(2**-23)
    v = np.repeat(2 * np.square(np.float64(divisor)).astype(np.float32), 8)
    v += np.arange(-4, 4).astype(np.float32) * np.float32(2**-20)
    assert divisor in np.sqrt(HALF * v)
    m = np.full(8, 2, np.float32)
    assert_same(quotients(device, m, v, 0.0), expected(m, v, 0.0), "a = 1")


@pytest.mark.parametrize("eps", [0.0, 1e-30, 1e-8, 0.5, 300.0])
def test_any_numbers_in_any_order(device: str, eps: float) -> None:
    """Eight neighbours are divided together: one hard number must not change the seven others."""
    rng = np.random.default_rng(3)
    n = 1 << 16
    m, v = (rng.integers(0, 0x7F800000, n, dtype=np.uint32).view(np.float32) for _ in range(2))
    usual = (rng.standard_normal(n) * 1e-3).astype(np.float32)
    for rare in (0.0, 0.02, 0.5, 1.0):  # the share of numbers from the whole range
        own_m = np.where(rng.random(n) < rare, m, usual)
        own_v = np.where(rng.random(n) < rare, v, usual * usual)
        own_m = own_m * rng.choice(np.array([-1, 1], np.float32), n)
        for special in (0.0, -0.0, np.inf, np.nan):
            own_m[rng.integers(0, n, n // 50)] = special
            own_v[rng.integers(0, n, n // 50)] = abs(special)
        assert_same(quotients(device, own_m, own_v, eps), expected(own_m, own_v, eps), f"{rare}")


@pytest.mark.parametrize("exponent", [-100, 100])
def test_where_the_easy_numbers_end(device: str, exponent: int) -> None:
    """The ranges of cuda/quotient.h: squares from 2^-100 to 2^100, numerators 2^-66 to 2^34."""
    edge = np.ldexp(np.float32(2), exponent).astype(np.float32).view(np.uint32)
    v = (edge + np.arange(-8, 8, dtype=np.int64)).astype(np.uint32).view(np.float32)
    for power in (-66, 34, 0):
        top = np.ldexp(np.float32(2), power).astype(np.float32).view(np.uint32)
        m = (top + np.arange(-8, 8, dtype=np.int64)).astype(np.uint32).view(np.float32)
        left, right = np.repeat(m, 16), np.tile(v, 16)
        for eps in (0.0, 1e-8):
            found = quotients(device, left, right, eps)
            assert_same(found, expected(left, right, eps), f"2^{power} / root of 2^{exponent}")


def test_rows_without_gradients_stay_where_they_are(device: str) -> None:
    """An embedding's rows that no batch has: 0 / (0 + eps), with the sign of the zero."""
    m, v = np.zeros(64, np.float32), np.zeros(64, np.float32)
    m[::3] = -0.0
    v[32:] = np.geomspace(1e-44, 1e38, 32)
    assert_same(quotients(device, m, v, 1e-8), expected(m, v, 1e-8), "zeros")


def test_the_easy_range_needs_no_subnormal_numbers() -> None:
    """Every number between numerator, square and quotient is normal, at the ends of the ranges."""
    text = (Path(__file__).parents[3] / "csrc/cuda/quotient.h").read_text()
    numerator, square = (
        2.0 ** -int(found)
        for name in ("Numerator", "Square")
        for found in re.findall(rf"kLeast{name} = \(127u - (\d+)\) << 2[34]", text)
    )
    span = 2.0 ** int(re.findall(r"kQuickSpan = (\d+)u << 23", text)[0])
    factors = (2.0**-8, 2.0**8)
    assert "divide.factor >= 0x1p-8f && divide.factor < 256.0f" in text
    assert "divide.eps < 256.0f" in text
    steps = []
    for root in (square**0.5, (square * span) ** 0.5):
        steps += [1 / root, root, 0.5 / root, root * root * 2.0**-24]
        for divisor in (root * factor + eps for factor in factors for eps in (0.0, 256.0)):
            steps += [divisor, 1 / divisor]
            for top in (numerator, numerator * span**0.5):  # its bits are doubled
                # A remainder is a multiple of the last bits of divisor and quotient.
                steps += [top / divisor, top * 2.0**-47]
    assert min(steps) >= 2.0**-126
    assert max(steps) < 2.0**128
