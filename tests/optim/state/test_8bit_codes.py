"""m8, i8 and log8: every code, every random byte, every scale, and what optimizers do with them.

Random bytes come from a counter, so no test can choose one for the native code. Where all 256 are
needed for a number, they are tried on the definition in NumPy, which has the native code's bits.
The native code sees every pair of a code and a byte somewhere among the scales.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import reference_formats as formats
import torch
from helpers import array, assert_same_bits
from rules import raw
from torch import nn

import amp_mp as amp

Floats = np.ndarray
EXHAUSTIVE = os.environ.get("AMP_MP_EXHAUSTIVE") == "1"
LARGEST = float(np.finfo(np.float32).max)
MOMENT_SCALES = np.arange(0x1980, 0x7F80).astype(np.uint16)  # bfloat16's numbers from 2^-76 on
LOG8_SCALES = np.arange(30, 256).astype(np.uint8)
MOMENTS = ("m8", "i8")  # alike but for what the codes between -127 and 127 stand for
FORMATS = (*MOMENTS, "log8")
SCALES = {"m8": MOMENT_SCALES, "i8": MOMENT_SCALES, "log8": LOG8_SCALES}
ALL_BYTES = np.arange(256).astype(np.uint8)


def native(x: Floats, format: str, device: str, step: int = 0) -> tuple[Floats, Floats]:
    """The codes and scales that the native code stores, with the definition's dtypes."""
    data, scales = amp.formats.encode(torch.from_numpy(x).to(device), format, step=step)
    kinds = (np.int8, np.uint16) if format in MOMENTS else (np.uint8, np.uint8)
    return raw(data).view(kinds[0]), raw(scales).view(kinds[1])


def decoded(codes: Floats, scales: Floats, format: str, device: str) -> Floats:
    """The native code's numbers."""
    kinds = (torch.int8, torch.bfloat16) if format in MOMENTS else (torch.uint8, torch.uint8)
    data = torch.from_numpy(codes.view(np.int8)).to(device).view(kinds[0])
    signed = scales.view(np.int16 if format in MOMENTS else np.int8)
    second = torch.from_numpy(signed).to(device).view(kinds[1])
    found = array(amp.formats.decode((data, second), format))
    wanted = formats.decode([codes, scales], format)
    assert_same_bits(found, wanted, device, format)
    return found


def every_code(format: str) -> tuple[Floats, Floats]:
    """Groups with all codes beside the code that keeps their scale, and all scales.

    A group's first code is 127 of moments, and 254 of log8: from 31/32 of a scale on, which is code
    255, the next scale is taken.
    """
    codes, first = (np.arange(-127, 128), 127) if format in MOMENTS else (np.arange(255), 254)
    rows = np.resize(codes, (-(-codes.size // 31), 31))
    groups = np.column_stack([np.full(len(rows), first), rows])
    scales, kind = SCALES[format], np.int8 if format in MOMENTS else np.uint8
    return np.tile(groups.reshape(-1), scales.size).astype(kind), np.repeat(scales, len(groups))


@pytest.mark.parametrize("format", FORMATS)
def test_numbers_rise_with_the_code_at_every_scale(device: str, format: str) -> None:
    scales = SCALES[format]
    codes = np.r_[-127:128, 127].astype(np.int8) if format in MOMENTS else ALL_BYTES
    values = decoded(np.tile(codes, scales.size), np.repeat(scales, 8), format, device)
    rows = values.reshape(scales.size, 256).astype(np.float64)
    assert np.isfinite(rows).all()
    if format in MOMENTS:
        rows = rows[:, :-1]  # -128 is not a code
        assert (rows[:, 127] == 0).all()
        assert np.array_equal(rows, -rows[:, ::-1])
        assert np.array_equal(rows[:, -1], (scales.astype(np.uint32) << 16).view(np.float32))
    else:
        assert (rows[:, 0] == np.exp2(scales - 127.0) * 2.0**-26).all()
        assert (rows[:, 255] == np.exp2(scales - 127.0) * 31 / 32).all()
    assert (np.diff(rows) > 0).all()


@pytest.mark.parametrize("format", FORMATS)
def test_what_was_stored_is_stored_again_whatever_the_bytes(device: str, format: str) -> None:
    """Natively every code meets every byte; by the definition 0 and 255 do, the extremes."""
    codes, scales = every_code(format)
    values = decoded(codes, scales, format, device)
    for byte in (0, 255):
        found = formats.encode(values, format, np.full(values.size, byte, np.uint8))
        assert np.array_equal(found[1], scales)
        assert np.array_equal(found[0], codes)
    met = np.zeros((256, 256), bool)
    for step in range(32 if EXHAUSTIVE or format == "log8" else 2):
        again, same = native(values, format, device, step)
        assert np.array_equal(same, scales)
        assert np.array_equal(again, codes)
        met[codes.view(np.uint8), formats.stream(values.size, step=step)] = True
    assert met[np.unique(codes.view(np.uint8))].all()


@pytest.mark.parametrize("format", FORMATS)
def test_codes_rise_with_the_number_and_with_the_byte(format: str) -> None:
    """All 256 bytes on 31 random numbers of each of many groups, in order."""
    generator = np.random.default_rng(0)
    top = np.exp2(generator.uniform(-70, 100, 400))
    low = 24 if format in MOMENTS else 30
    x = np.sort(top[:, None] * np.exp2(-generator.uniform(0, low, (400, 32))), axis=1)
    x = x.astype(np.float32).reshape(-1)
    before = None
    for byte in ALL_BYTES:
        codes = formats.encode(x, format, np.full(x.size, byte))[0].astype(np.int64)
        assert (np.diff(codes.reshape(-1, 32)) >= 0).all()
        assert before is None or ((codes - before >= 0) & (codes - before <= 1)).all()
        before = codes


def mean_of_all_bytes(x: Floats, format: str) -> Floats:
    total = np.zeros(x.size)
    for byte in ALL_BYTES:
        parts = formats.encode(x, format, np.full(x.size, byte))
        total += formats.decode(parts, format)
    return total / 256


def below_and_above(x: Floats, levels: Floats) -> tuple[Floats, Floats, Floats]:
    """For each row's numbers the number of the level below, and the levels below and above."""
    at = np.stack(
        [np.searchsorted(own, row, "right") - 1 for own, row in zip(levels, x, strict=True)]
    )
    at = at.clip(0, levels.shape[1] - 2)
    return at, *(np.take_along_axis(levels, at + more, 1) for more in (0, 1))


def test_the_mean_of_log8_is_right() -> None:
    """Rounded to 1/256 of a code, which is an eighth of a number at most: off by 2^-12 < .025 %."""
    generator = np.random.default_rng(1)
    scales = generator.choice(LOG8_SCALES, 300)
    part = np.exp2(generator.uniform(-26, np.log2(31 / 32), (300, 32)))
    part[:, 0] = 15 / 16
    x = (part * np.exp2(scales - 127.0)[:, None]).astype(np.float32)
    mean = mean_of_all_bytes(x.reshape(-1), "log8").reshape(x.shape)
    error = mean / x.astype(np.float64) - 1
    assert np.abs(error).max() <= 2.0**-12
    assert abs(error.mean()) <= 2.0**-12 / 10  # to the nearest: no bias in any direction


def test_the_mean_of_i8_is_right() -> None:
    """Within half a 256th of a code, besides what float32 loses; above and below equally often.

    Also of numbers far below a code, which a large one in their group makes of the others.
    """
    generator = np.random.default_rng(4)
    scales = MOMENT_SCALES[:: 1 if EXHAUSTIVE else 129]
    part = np.exp2(-generator.uniform(0, 25, (scales.size, 32)))
    part[:, ::2] = generator.uniform(-1, 1, part[:, ::2].shape)
    part[:, 0] = 1
    scale = (scales.astype(np.uint32) << 16).view(np.float32)[:, None]
    x = (part * scale).astype(np.float32)
    mean = mean_of_all_bytes(x.reshape(-1), "i8").reshape(x.shape)
    code = scale.astype(np.float64) / 127
    error = (mean - x) / code
    assert np.abs(error).max() <= 1 / 512 + 127 * 2.0**-22
    assert np.abs(error[:, ::2].mean()) <= 6 / 512 / np.sqrt(error[:, ::2].size)


def test_the_mean_of_m8_is_right() -> None:
    """Within 3/4 of a 256th of a code where the format is a straight line from code to code.

    Half of it is rounding to 256ths, the rest float's rounding of the third of the bits. A code is
    at most 3/64 of a number above an eighth of the scale, so .014 % there. The number is no
    straight line where a power of two lies between two codes, three times an octave of codes: its
    slope doubles there. The mean is on the chord, above the number by f (1 - f) s for a bend at f,
    where s is what a code is worth below the bend, 3/128 of the number in the largest octave: hence
    .59 % at most. A code's whole worth is s (2 - f), and f (1 - f) / (2 - f) is .1716 at most.
    Codes below 4 have up to three bends each; the chord is then less than .3 of a code's worth
    above, by trial of all scales. Below code 1 the mean is at most code 1.
    """
    generator = np.random.default_rng(2)
    mantissas = MOMENT_SCALES[:: 1 if EXHAUSTIVE else 129]
    part = np.exp2(-generator.uniform(0, 25, (mantissas.size, 32)))
    part[:, 0] = 1
    scale = (mantissas.astype(np.uint32) << 16).view(np.float32)
    x = (part * scale[:, None]).astype(np.float32)
    codes = np.tile(np.arange(128).astype(np.int8), mantissas.size)
    levels = formats.decode([codes, mantissas.repeat(4)], "m8").reshape(-1, 128).astype(np.float64)
    mean = mean_of_all_bytes(x.reshape(-1), "m8").reshape(x.shape)
    q, below, above = below_and_above(x.astype(np.float64), levels)
    error, worth = mean - x, above - below
    octaves = np.frexp(np.nextafter(above, 0))[1] - np.frexp(np.where(q == 0, above, below))[1]
    straight, bent = ((q > 0) & (octaves == n) for n in (0, 1))
    small = (q > 0) & (octaves > 1)
    assert (np.abs(error)[straight] <= 0.75 / 256 * worth[straight]).all()
    assert (error[bent] >= -0.75 / 256 * worth[bent]).all()
    assert (error[bent] <= (0.1716 + 0.75 / 256) * worth[bent]).all()
    assert error[bent].max() > 0  # there are such numbers
    assert (q[small] < 4).all()
    assert (np.abs(error)[small] <= 0.3 * worth[small]).all()
    assert (mean[q == 0] <= above[q == 0]).all()
    relative = error / x
    top = q >= 64
    assert np.abs(relative[top & straight]).max() <= 1.4e-4
    assert relative[top].max() <= 0.0059 + 1.4e-4
    assert abs(relative[top].mean()) <= 1e-3


@pytest.mark.parametrize("format", MOMENTS)
def test_zero_stays_zero_and_the_largest_has_the_largest_code(format: str) -> None:
    """For every byte and every scale."""
    x = np.zeros((MOMENT_SCALES.size, 32), np.float32)
    x[:, 0] = (MOMENT_SCALES.astype(np.uint32) << 16).view(np.float32)
    x[:, 1] = -x[:, 0]
    x[:, 3] = -0.0
    few = x if EXHAUSTIVE else x[::37]
    for byte in ALL_BYTES:
        rows = x if byte in (0, 255) else few
        codes = formats.encode(rows.reshape(-1), format, np.full(rows.size, byte))[0]
        codes = codes.reshape(-1, 32)
        assert (codes[:, 0] == 127).all()
        assert (codes[:, 1] == -127).all()
        assert (codes[:, 2:] == 0).all()


@pytest.mark.parametrize("format", MOMENTS)
def test_any_numbers_have_codes_to_127_and_a_scale_not_below_them(device: str, format: str) -> None:
    """bfloat16's numbers above the largest of the group are at most 2^-7 above it, or 2^-76."""
    generator = np.random.default_rng(3)
    bits = generator.integers(0, 0x7F7F0001, 1 << 20, np.uint32)
    x = bits.view(np.float32) * generator.choice(np.float32([-1, 1]), bits.size)
    x[: 1 << 19] = generator.standard_normal(1 << 19).astype(np.float32)
    codes, scales = native(x, format, device)
    assert (np.abs(codes.astype(int)) <= 127).all()
    most = np.abs(x.reshape(-1, 32)).max(axis=1).astype(np.float64)
    scale = (scales.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    assert (scale >= most).all()
    assert (scale <= np.maximum(most * (1 + 2.0**-7), 2.0**-76)).all()
    assert (np.abs(decoded(codes, scales, format, device)) <= scale.repeat(32)).all()


@pytest.mark.parametrize("format", FORMATS)
def test_a_scale_rises_with_the_largest_of_its_group(device: str, format: str) -> None:
    """At and beside every number at which another scale begins."""
    if format in MOMENTS:
        edges = MOMENT_SCALES.astype(np.uint32) << 16
    else:
        edges = (LOG8_SCALES.astype(np.uint32) << 23) - (1 << 19)
    bits = np.sort((edges[:, None] + np.array([-1, 0, 1])).reshape(-1)).astype(np.uint32)
    top = 0x7F7F0000 if format in MOMENTS else 0x7F780000 - 1  # above, the group is NaN
    bits = np.concatenate([np.array([0, 1, 1 << 23], np.uint32), bits[bits <= top]])
    x = np.zeros((bits.size, 32), np.float32)
    x[:, 7] = bits.view(np.float32)
    x[:, 9] = x[:, 7] / 2
    _, scales = native(x.reshape(-1), format, device)
    kept = scales.astype(np.int64)
    assert (np.diff(kept) >= 0).all()
    assert set(kept) == set(SCALES[format].tolist())
    if format == "log8":
        scale = np.exp2(scales - 127.0)
        assert (x[:, 7] < 31 / 32 * scale).all()
        least = scales == 30
        assert (x[~least, 7] >= 31 / 64 * scale[~least]).all()


def test_log8_has_a_floor_and_no_zero(device: str) -> None:
    """2^-26 of the scale stands for everything below it, for every byte."""
    x = np.zeros((LOG8_SCALES.size, 32), np.float32)
    scale = np.exp2(LOG8_SCALES - 127.0)
    x[:, 0] = 0.75 * scale
    x[:, 1] = scale * 2.0**-26
    with np.errstate(under="ignore"):
        x[:, 2] = x[:, 1] * np.float32(0.999)
        x[:, 3] = scale * 2.0**-60
    x[:, 4] = 1e-45
    for byte in ALL_BYTES:
        codes, scales = formats.encode(x.reshape(-1), "log8", np.full(x.size, byte))
        assert np.array_equal(scales, LOG8_SCALES)
        assert (codes.reshape(-1, 32)[:, 1:] == 0).all()
    found = decoded(*native(x.reshape(-1), "log8", device), "log8", device).reshape(-1, 32)
    assert (found[:, 1:] == (scale * 2.0**-26)[:, None]).all()


def test_a_log8_group_that_reaches_the_top_of_its_scale_keeps_its_numbers(device: str) -> None:
    """Code 255 takes the next scale; the numbers down to 1/32 of the old one are there, too."""
    scales = LOG8_SCALES[:-1]
    codes = np.tile(np.arange(224, 256), scales.size).astype(np.uint8)
    values = decoded(codes, scales, "log8", device)
    for step in range(8):
        again, next_scales = native(values, "log8", device, step)
        assert np.array_equal(next_scales, scales + 1)
        assert np.array_equal(again, codes - 16)
        found = decoded(again, next_scales, "log8", device)
        assert np.array_equal(found, values)


def test_numbers_near_the_largest_float(device: str) -> None:
    """Groups with a number above the largest scale become NaN: 3.3e38 in log8, else 3.39e38."""
    top = np.float32(31 / 32 * 2.0**128)
    x = np.ones((6, 32), np.float32)
    x[:, 5] = [1.7e38, 3e38, np.nextafter(top, np.float32(0)), top, 3.35e38, LARGEST]
    found = decoded(*native(x.reshape(-1), "log8", device), "log8", device).reshape(-1, 32)
    assert np.allclose(found[:3, 5], x[:3, 5], rtol=1 / 16)
    assert np.isnan(found[3:]).all()
    bfloat16 = np.array([0x7F7F0000], np.uint32).view(np.float32)[0]
    x[:, 5] = [1e38, 3e38, bfloat16, np.nextafter(bfloat16, np.float32(np.inf)), 3.4e38, LARGEST]
    for format in MOMENTS:
        found = decoded(*native(x.reshape(-1), format, device), format, device).reshape(-1, 32)
        assert np.isfinite(found[:3]).all()
        assert found[2, 5] == bfloat16
        assert np.isnan(found[3:]).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_bad_number_spoils_its_own_group_alone(device: str, format: str, bad: float) -> None:
    for place in range(32):
        x = np.ones(96, np.float32)
        x[32 + place] = bad
        found = decoded(*native(x, format, device), format, device)
        assert np.isnan(found[32:64]).all()
        assert np.allclose(found[np.r_[0:32, 64:96]], 1, rtol=3 / 64)


def test_a_negative_number_spoils_its_group_of_log8(device: str) -> None:
    x = np.ones(64, np.float32)
    x[3] = -1e-45
    found = decoded(*native(x, "log8", device), "log8", device)
    assert np.isnan(found[:32]).all()
    assert (found[32:] == 1).all()


@pytest.mark.parametrize("format", FORMATS)
def test_groups_of_zeros(device: str, format: str) -> None:
    """-0 is 0. What no step has written is 0 in all; log8's least number is 2^-123."""
    x = np.zeros(64, np.float32)
    x[::3] = -0.0
    found = decoded(*native(x, format, device), format, device)
    assert (found == (0 if format in MOMENTS else 2.0**-123)).all()
    fresh = np.zeros(64, np.int8 if format in MOMENTS else np.uint8)
    scales = np.zeros(2, np.uint16 if format in MOMENTS else np.uint8)
    assert (decoded(fresh, scales, format, device) == 0).all()


# Random bytes.


def test_every_element_draws_a_new_byte_in_every_step() -> None:
    """Each byte as often as the others: chi squared of 255 degrees, within 6 deviations."""
    steps, size = 256, 4096
    drawn = np.stack([formats.stream(size, seed=5, step=s).astype(int) for s in range(steps)])
    for counts in (np.bincount(drawn.reshape(-1), minlength=256), np.bincount(drawn[:, 77] // 16)):
        wanted = counts.sum() / counts.size
        chi = float(((counts - wanted) ** 2).sum() / wanted)
        assert abs(chi - counts.size) <= 6 * np.sqrt(2 * counts.size)
    # Equal bytes in two steps, as often as by chance: 1 in 256.
    same = (drawn[1:] == drawn[:-1]).mean(axis=0)
    assert same.max() <= 1 / 256 + 6 * np.sqrt(1 / 256 / (steps - 1))
    blocks = drawn.reshape(steps, -1, 4, 64)
    for partner in range(4):
        assert ((blocks[:, :, partner] - blocks[:, :, 0]) % 256 == 64 * partner).all()


@pytest.mark.full
@pytest.mark.parametrize("format", ["bfloat16", "m8", "i8", "ue8m8", "log8"])
def test_sums_over_rows_are_as_good_as_with_independent_bytes(device: str, format: str) -> None:
    """The error of the sums, at most a tenth larger.

    Four elements of a row of 256 share a byte. Moments with beta .95 over 500 steps, the errors of
    256 rows every 20 steps, which are nearly independent: 5,632 numbers, whose root mean square is
    within 1 % of what it is over all, so that the quotient is off by a hundredth and a half.
    """
    rows, columns, beta = 256, 256, 0.95
    generator = np.random.default_rng(1)
    spread = np.exp(generator.standard_normal((rows, columns)))
    exact = np.zeros((rows, columns))
    shared = independent = np.zeros(rows * columns, np.float32)
    errors: list[list[Floats]] = [[], []]
    for step in range(500):
        new = spread * generator.standard_normal((rows, columns))
        new = (new**2 if format in ("ue8m8", "log8") else new).astype(np.float32)
        exact = beta * exact + (1 - beta) * new
        added = np.float32(1 - beta) * new.reshape(-1)
        values = torch.from_numpy(np.float32(beta) * shared + added).to(device)
        parts = amp.formats.encode(values, format, step=step)
        shared = array(amp.formats.decode(parts, format))
        drawn = generator.integers(0, 256, rows * columns, dtype=np.uint8)
        independent = np.float32(beta) * independent + added
        independent = formats.decode(formats.encode(independent, format, drawn), format)
        if step >= 60 and step % 20 == 0:
            size = np.sqrt((exact**2).sum(axis=1))
            for found, stored in zip(errors, (shared, independent), strict=True):
                sums = stored.reshape(rows, columns).sum(axis=1, dtype=np.float64)
                found.append((sums - exact.sum(axis=1)) / size)
    one, two = (float(np.sqrt(np.mean(np.square(each)))) for each in errors)
    assert one <= 1.1 * two
    assert one >= 0.5 * two  # and not by storing something else


# Optimizers.


def test_updates_of_mixed_groups_do_not_grow(device: str) -> None:
    """Adam bounds its update by what m and v are of the same gradients: so they have to agree."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.exp(1.5 * torch.randn(512, 32, generator=generator))
    grads = [(spread * torch.randn(512, 32, generator=generator)).to(device) for _ in range(420)]
    largest = {}
    for memory in ("exact", "lean", "tiny", "micro"):
        param = nn.Parameter(torch.zeros(512, 32, device=device))
        optimizer = amp.optim.AdamW(
            [param], lr=1e-3, weight_decay=0.0, memory=memory, master="float32"
        )
        most = torch.zeros((), device=device)
        for grad in grads:
            param.grad = grad
            optimizer.step()
            most = torch.maximum(most, param.detach().abs().max())
            param.data.zero_()
        largest[memory] = float(most)
    for memory in ("lean", "tiny", "micro"):
        assert largest[memory] <= 1.5 * largest["exact"], memory


def test_states_without_rows_of_32_have_no_groups(device: str) -> None:
    """Biases, and rows that a group would reach beyond; the layout in memory counts."""
    ones = {
        "matrix": (torch.ones(5, 64), True),
        "bias": (torch.ones(64), False),
        "column": (torch.ones(64, 1), False),
        "odd rows": (torch.ones(32, 31), False),
        "transposed": (torch.ones(64, 5).t(), False),
        "filters": (torch.ones(2, 3, 8, 4), True),
        "empty": (torch.ones(0, 32), False),
    }
    params = {name: nn.Parameter(x.to(device).bfloat16()) for name, (x, _) in ones.items()}
    optimizer = amp.optim.AdamW(params.values(), memory="micro")
    for param in params.values():
        param.grad = torch.ones_like(param)
    optimizer.step()
    codes = {"exp_avg_m8": torch.int8, "exp_avg_m8_scale": torch.bfloat16}
    codes |= dict.fromkeys(("exp_avg_sq_log8", "exp_avg_sq_log8_scale"), torch.uint8)
    plain = {"exp_avg": torch.bfloat16, "exp_avg_sq_ue8m8": torch.int16}
    for name, param in params.items():
        state = optimizer.state[param].items()
        found = {entry: value.dtype for entry, value in state if entry.startswith("exp_avg")}
        assert found == (codes if ones[name][1] else plain), name
