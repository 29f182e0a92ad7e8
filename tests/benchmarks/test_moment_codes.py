"""benchmarks/moments: the codes of this project and of others, against their definitions."""

from __future__ import annotations

from typing import Any

import moment_codes as own
import numpy as np
import published_codes as published
import pytest
import reference_formats
import torch
from moment_codes import Code

F32 = np.float32
ALL_BYTES = np.arange(256, dtype=np.uint8)
GROUPS = [own.M8, own.LOG8, own.CUBE]


def with_largest(x: Any, largest: float, group: int = own.GROUP) -> Any:
    """Each number in a group of its own: the largest, the number, and zeros."""
    groups = np.zeros((len(x), group), F32)
    groups[:, 0], groups[:, 1] = largest, x
    return groups.reshape(-1)


def by_each_byte(code: Code, x: Any, largest: float = 1) -> Any:
    """What comes back of each number in a group with the largest, a row for each random byte."""
    flat = with_largest(x, largest)
    found = [code.stored(flat, np.full(flat.size, byte, np.uint8)) for byte in ALL_BYTES]
    return np.stack(found).reshape(256, len(x), own.GROUP)[:, :, 1].astype(np.float64)


def log_normal(seed: int, log_sd: float = 1.5, size: float = 1e-3) -> Any:
    source = np.random.default_rng(seed)
    sizes = size * np.exp(log_sd * source.standard_normal(4096))
    return (sizes * source.standard_normal(4096)).astype(F32)


def random(seed: int = 9, count: int = 4096) -> Any:
    return own.random_bytes(np.random.default_rng(seed), count)


# ---- codes of this project -----------------------------------------------------------------------


@pytest.mark.parametrize("format", ["bfloat16_stochastic", "ue8m8", "m8", "log8"])
def test_the_simulation_stores_what_the_kernels_store(format: str) -> None:
    """The same arrays as the definitions that the kernels are compared with, bit for bit."""
    code = {"m8": own.M8, "log8": own.LOG8, "ue8m8": own.UE8M8}.get(format, own.BFLOAT16)
    for seed, size in enumerate((1e-3, 1e-20, 1e10)):
        x, bits = log_normal(seed, 2, size), random(seed)
        x = np.abs(x) if format in ("ue8m8", "log8") else x
        wanted = reference_formats.encode(x, format, bits)
        found = [array for array in code.encode(x, bits) if array is not None]
        for array, want in zip(found, wanted, strict=True):
            assert np.array_equal(array.view(want.dtype), want)
        back = code.decode(*code.encode(x, bits))
        assert np.array_equal(back, reference_formats.decode(wanted, format))


def test_partners_of_a_random_byte_are_spread_evenly() -> None:
    drawn = random(1, 1 << 16).reshape(-1, 4, 64).astype(int)
    for partner in range(4):
        assert np.array_equal(drawn[:, partner], (drawn[:, 0] + 64 * partner) % 256)
    counts = np.bincount(drawn[:, 0].reshape(-1), minlength=256)
    assert counts.sum() == 1 << 14
    assert 0.5 < counts.min() / 64 <= counts.max() / 64 < 1.6


@pytest.mark.parametrize("code", [own.BFLOAT16, own.UE8M8], ids=lambda code: code.name)
def test_16_bit_codes_have_the_right_mean_and_keep_what_fits(code: Code) -> None:
    x = np.abs(log_normal(2))
    found = np.stack([code.stored(x, np.full(x.size, byte, np.uint8)) for byte in ALL_BYTES])
    mean = found.astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(mean, x, rtol=2e-5)
    once = code.stored(x, random())
    for byte in (0, 255):
        assert np.array_equal(code.stored(once, np.full(x.size, byte, np.uint8)), once)


def log8_levels() -> Any:
    """Below the scale: 20 binades of 8 steps, and 6 of 16."""
    coarse = [2.0 ** (k - 26) * (1 + i / 8) for k in range(20) for i in range(8)]
    fine = [2.0 ** (k - 6) * (1 + i / 16) for k in range(6) for i in range(16)]
    return np.array(coarse + fine)


@pytest.mark.parametrize("exponent", [30, 100, 127, 254])
def test_log8_has_its_256_levels_below_a_power_of_two(exponent: int) -> None:
    scales = np.full(256 // own.GROUP, exponent, np.uint8)
    found = own.decode_log8(np.arange(256, dtype=np.uint8), scales)
    assert np.array_equal(found, log8_levels() * 2.0 ** (exponent - 127))


def test_log8_stores_its_levels_as_they_are() -> None:
    levels = log8_levels().astype(F32)
    assert np.array_equal(
        by_each_byte(own.LOG8, levels, levels[-2]), np.tile(levels, (256, 1)).astype(np.float64)
    )


def test_log8_has_the_right_mean_for_every_number() -> None:
    """A thousandth for each, and no lean: a sum of squares is stored thousands of times."""
    x = np.exp(np.linspace(np.log(2.0**-26), np.log(0.96), 5000)).astype(F32)
    ratio = by_each_byte(own.LOG8, x, 0.96).mean(axis=0) / x
    np.testing.assert_allclose(ratio, 1, rtol=1e-3)
    assert abs(ratio.mean() - 1) < 1e-5


def test_log8_has_a_floor_instead_of_zero() -> None:
    found = by_each_byte(own.LOG8, np.array([0, 1e-30, 2.0**-40], F32))
    assert (found == 2.0**-25).all()  # 1 is not below 31/32 of 1, so the scale is 2
    nothing_at_all = own.LOG8.stored(np.zeros(256, F32), random(3, 256))
    assert (nothing_at_all == 2.0**-123).all()


def test_log8s_largest_code_is_not_passed() -> None:
    """Each largest number of a group comes back as one of its neighbours, with every byte."""
    mantissas = np.linspace(1, 2, 1001, dtype=F32)
    x = np.concatenate([mantissas, np.nextafter(F32([1.9375, 2]), F32(0))])
    groups = np.zeros((1008, own.GROUP), F32)  # a multiple of 8 groups
    groups[: len(x), 0] = x
    for byte in ALL_BYTES:
        back = own.LOG8.stored(groups.reshape(-1), np.full(groups.size, byte, np.uint8))
        found = back.reshape(-1, own.GROUP)[: len(x), 0]
        assert (np.abs(found / x - 1) < 1 / 16).all()


def m8_levels(scale: float = 1) -> Any:
    """What codes 0 to 127 stand for; the scale is a bfloat16."""
    bits = (np.array([scale], F32).view(np.uint32) >> 16).astype(np.uint16)
    return own.decode_m8(np.arange(128, dtype=np.int8), np.repeat(bits, 4)).astype(np.float64)


def test_m8s_levels_are_nearly_cubes() -> None:
    levels = m8_levels()
    assert levels[0] == 0
    assert levels[127] == 1
    assert (np.diff(levels) > 0).all()
    assert np.array_equal(levels[2::2], 8 * levels[1:64])
    ratio = levels[1:] / (np.arange(1, 128) / 127) ** 3
    assert 0.8 < ratio.min() < ratio.max() < 1.25


@pytest.mark.parametrize("scale", [2.0**-76, 1.5e-9, 1.0, 1.9921875, 2.0**127])
def test_m8_keeps_its_levels_for_every_byte_and_zero_stays_zero(scale: float) -> None:
    scale = float(own.decode_bfloat16(own.encode_bfloat16(F32([scale]), ALL_BYTES[:1])[0])[0])
    levels = m8_levels(scale)
    assert levels[127] == scale
    both = np.concatenate([levels, -levels])
    found = by_each_byte(own.M8, both.astype(F32), scale)
    assert np.array_equal(found, np.tile(both, (256, 1)))


def test_m8_stores_zeros_and_groups_below_its_least_scale() -> None:
    x = F32([0, -0.0, 1e-45, -1e-38, 1e-30])
    found = by_each_byte(own.M8, x, 1e-30)
    assert (found[:, :2] == 0).all()
    assert np.isin(np.abs(found), [0, m8_levels(2.0**-76)[1]]).all()


def test_m8_rounds_to_neighbours_and_leans_to_no_side_where_codes_are_large() -> None:
    x = np.exp(np.linspace(np.log(1e-3), 0, 4000)).astype(F32)
    found = by_each_byte(own.M8, x)
    levels = m8_levels()
    above = np.minimum(np.searchsorted(levels, x), 127)
    exact = levels[above] == x
    assert ((found == levels[above]) | (found == levels[above - 1]) | exact).all()
    ratio = found.mean(axis=0) / x
    np.testing.assert_allclose(ratio, 1, rtol=0.03)  # most at the few codes where a cell has a kink
    assert abs(ratio.mean() - 1) < 2e-3
    mirrored = by_each_byte(own.M8, -x).mean(axis=0)
    np.testing.assert_allclose(mirrored, -found.mean(axis=0), rtol=1e-12)


@pytest.mark.parametrize("code", [own.M8, own.CUBE], ids=lambda code: code.name)
def test_first_moments_never_pass_their_scale(code: Code) -> None:
    for seed in range(20):
        x = log_normal(seed, log_sd=2)
        most = np.abs(x).reshape(-1, own.GROUP).max(axis=1)
        for byte in (0, 255):
            back = code.stored(x, np.full(x.size, byte, np.uint8)).reshape(-1, own.GROUP)
            assert (np.abs(back).max(axis=1) <= most * (1 + 2.0**-7)).all()


@pytest.mark.parametrize("code", GROUPS, ids=lambda code: code.name)
@pytest.mark.parametrize("power", [-40, 20])
def test_codes_do_not_depend_on_the_unit(code: Code, power: int) -> None:
    x = np.abs(log_normal(4))
    moved = code.stored(x * F32(2.0**power), random())
    assert np.array_equal(moved, code.stored(x, random()) * F32(2.0**power))


# ---- codes of others -----------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [True, False])
def test_the_dynamic_map_has_256_levels_over_7_decades(signed: bool) -> None:
    levels = published.dynamic_map(signed, 7, 8)
    assert len(np.unique(levels)) == 256
    assert (levels[0] < 0) == signed
    positive = levels[levels > 0].astype(np.float64)
    assert positive[-1] == 1
    counts = np.histogram(positive, 10.0 ** np.arange(-7, 1) * (1 - 1e-6))[0]
    assert list(counts) == [2**k * (1 if signed else 2) for k in range(7)]


TABLES = {
    "bitsandbytes m": (published.BNB_MOMENT, published.SIGNED, 256),
    "bitsandbytes v": (published.BNB_VARIANCE, published.UNSIGNED, 256),
    "torchao m": (published.AO8_MOMENT, published.SIGNED, 256),
    "torchao 4 bits": (published.AO4_MOMENT, published.dynamic_map(True, 3, 4), 128),
    "torchao 4 bits v": (published.AO4_VARIANCE, np.arange(1, 17) / 16, 128),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_give_the_nearest_level(name: str) -> None:
    code, levels, block = TABLES[name]
    x = log_normal(5)
    x[::9] *= F32(1e-7)  # these are nearest to 0
    x = x * x if name.endswith("v") else x
    blocks = x.reshape(-1, block).astype(np.float64)
    most = np.abs(blocks).max(axis=1, keepdims=True)
    found = code.stored(x, random()).reshape(-1, block)
    nearest = np.abs((blocks / most)[..., None] - levels).min(axis=-1)
    distance = np.abs(blocks - found) / most
    if name == "bitsandbytes m":  # a negative number never becomes 0
        kept = blocks >= 0
        assert (found[~kept] < 0).all()
        distance, nearest = distance[kept], nearest[kept]
    np.testing.assert_allclose(distance, nearest, atol=1e-6)


def test_fp8_is_torchs_float8() -> None:
    x = log_normal(6)
    blocks = torch.from_numpy(x).view(-1, 256)
    scale = blocks.abs().amax(1, keepdim=True) / 448
    wanted = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    assert np.array_equal(published.AO_FP8.stored(x, random()), wanted.flatten().numpy())


def test_flashoptims_codes_are_nearest_after_companding_and_keep_themselves() -> None:
    x = log_normal(7)
    for code, value, inverse in (
        (published.FLASH_MOMENT, x, lambda t: t / (2 - np.abs(t))),
        (published.FLASH_VARIANCE, x * x, lambda t: t),
    ):
        codes, scales = code.encode(value, random())
        wide = value.astype(np.float64).reshape(-1, 32)
        wide = wide if code is published.FLASH_MOMENT else np.sqrt(wide)
        most = np.abs(wide).max(axis=1, keepdims=True)
        steps = 127 if code is published.FLASH_MOMENT else 255
        n = wide / most
        half = 0.5001 / steps
        place = codes.reshape(-1, 32).astype(np.float64) / steps
        low, high = inverse(place - half), inverse(place + half)
        assert ((low <= n) & (n <= high)).all()
        assert scales is not None
        np.testing.assert_array_equal(scales, most[:, 0].astype(F32).astype(np.float16))
        once = code.decode(codes, scales)
        assert np.array_equal(code.encode(once, random())[0], codes)
