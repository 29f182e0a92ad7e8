"""Compact formats: what they can hold, bit for bit, and what optimizers that use them still do."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import reference
import reference_formats as formats
import torch
from helpers import DTYPES, RAGGED, array, assert_same, interesting_floats, random, raw_bytes
from rules import (
    PRESETS,
    RULES,
    STORAGES,
    WITHOUT_ROWS,
    Expected,
    found_master,
    found_state,
    raw,
)
from torch import Tensor, nn

import amp_mp as amp
from amp_mp import _C

SPLITS = ("split32", "split24")
LOW = ("bfloat16", "float16")
CHUNK = 1 << 20
MEMORIES = [m for m in PRESETS if m not in (None, "float32")]
# What the presets store moments and squares as.
MOMENTS = sorted({PRESETS[m][1] for m in MEMORIES})
SQUARES = sorted({PRESETS[m][2] for m in MEMORIES})


def patterns() -> Iterator[np.ndarray]:
    """float32 numbers by strata, and 2^24 at random; AMP_MP_EXHAUSTIVE=1: all 2^32 there are."""
    if os.environ.get("AMP_MP_EXHAUSTIVE") == "1":
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


def test_split32_of_bfloat16_loses_nothing(device: str) -> None:
    for x in patterns():
        weight, found = there_and_back(device, x, "split32")
        x = np.where(is_infinite(x), np.copysign(np.float32(np.inf), x), x)
        bits = np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32))
        assert np.array_equal(found.view(np.uint32), bits)
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
        ulp = np.exp2(np.maximum(np.frexp(wide)[1] - 1, -126) - 7)
        error = np.abs(found[finite] - wide) / ulp
        worst = max(worst, float(error.max(initial=0)))
    assert worst == 1 / 512


def pairs(rest_bits: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Weights and remainders: all 2^24 of int8; of int16 some, or with AMP_MP_EXHAUSTIVE=1 all."""
    weights = np.arange(1 << 16, dtype=np.uint16)
    rests = np.arange(-(1 << rest_bits - 1), 1 << rest_bits - 1)
    if rest_bits == 16 and os.environ.get("AMP_MP_EXHAUSTIVE") != "1":
        rests = np.concatenate([rests[:3], rests[-3:], np.arange(-3, 4), rests[::997]])
    for part in np.array_split(rests, -(-rests.size // 64)):
        grid = np.broadcast_arrays(weights, part.astype(f"i{rest_bits // 8}")[:, None])
        yield grid[0].reshape(-1), grid[1].reshape(-1)


@pytest.mark.parametrize("format", SPLITS)
@pytest.mark.parametrize("weight", LOW)
def test_any_pair_is_within_one_unit_of_the_weight(device: str, format: str, weight: str) -> None:
    """Whatever a user writes into a weight, and whatever remainder lies beside it.

    A unit is the distance to the next weight towards zero, or of the two around zero.
    """
    for bits, rests in pairs(formats.REST_BITS[format]):
        low = torch.from_numpy(bits.view(np.int16).copy()).view(DTYPES[weight]).to(device)
        plain = array(low)
        rest = torch.from_numpy(rests.copy()).to(device)
        found = array(amp.formats.decode((low, rest), format))
        finite = np.isfinite(plain)
        assert np.array_equal(np.isnan(found), np.isnan(plain))
        assert np.array_equal(found[np.isinf(plain)], plain[np.isinf(plain)])
        below = torch.from_numpy((bits & 0x7FFF).astype(np.int16) - 1).clamp_(0)
        inner = array(below.view(DTYPES[weight]))
        tiny = np.float32(2.0**-133 if weight == "bfloat16" else 2.0**-24)
        unit = np.maximum(np.abs(plain[finite]).astype(np.float64) - inner[finite], tiny)
        assert (np.abs(found[finite].astype(np.float64) - plain[finite]) <= unit).all()


@pytest.mark.parametrize("format", SPLITS)
def test_splits_of_float16(device: str, format: str) -> None:
    """split32: exact from 2^-16 on, within 2^-40 below. split24: within a 256th of an ulp."""
    for x in patterns():
        weight, found = there_and_back(device, x, format, "float16")
        assert np.array_equal(weight.isnan().cpu().numpy(), np.isnan(x))
        assert np.array_equal(np.isnan(found), np.isnan(x))
        kept = ~np.isnan(x)
        wanted, found = np.clip(x[kept], -65504, 65504).astype(np.float64), found[kept]
        ulp = np.exp2(np.maximum(np.frexp(array(weight)[kept])[1] - 1, -14) - 10.0)
        ulp[array(weight)[kept] == 0] = 2.0**-24
        error = np.abs(found - wanted)
        if format == "split24":
            assert (error <= ulp / 256).all()
            continue
        assert (error <= 2.0**-40).all()
        assert (error[np.abs(wanted) >= 2.0**-16] == 0).all()


@pytest.mark.parametrize("format", SPLITS)
@pytest.mark.parametrize("weight", LOW)
def test_weights_that_no_step_has_written_are_read(device: str, format: str, weight: str) -> None:
    """All 65,536, with every kind of remainder: not finite stays so, remainders of 0 add 0."""
    bits = np.arange(1 << 16).astype(np.uint16)
    kind = f"i{formats.REST_BITS[format] // 8}"
    most = int(np.iinfo(kind).max)
    low = torch.from_numpy(bits.view(np.int16)).view(DTYPES[weight]).to(device)
    plain = array(low)
    for rest in (0, 1, -1, most, -most, most // 3):
        rests = np.full(bits.size, rest, kind)
        found = array(amp.formats.decode((low, torch.from_numpy(rests).to(device)), format))
        assert np.array_equal(np.isnan(found), np.isnan(plain))
        same = np.isinf(plain) | (rest == 0)
        assert np.array_equal(found[same], plain[same], equal_nan=True)
        with np.errstate(invalid="ignore"):
            assert_same(found, formats.decode([bits, rests], format, weight), "decoded")


# Every format against the definition.

ENCODED = [
    *((split, weight) for split in SPLITS for weight in LOW),
    *((format, "bfloat16") for format in amp.formats.NAMES if format not in (*SPLITS, "float32")),
]


@pytest.mark.parametrize(("format", "weight"), ENCODED)
def test_encoding_equals_the_reference_bit_for_bit(device: str, format: str, weight: str) -> None:
    seed, step, number = 7 << 33 | 5, 9, 3
    inputs = [random(n, n, special=True) for n in RAGGED]
    inputs += [interesting_floats(), random(4096, 1, 1e-38), random(4096, 2, 1e30)]
    for values in inputs:
        values = values[: values.size // 32 * 32] if format in WITHOUT_ROWS else values
        values = np.abs(values) if format in ("ue8m8", "log8", "float16_root") else values
        parts = amp.formats.encode(
            torch.from_numpy(values).to(device),
            format,
            weight_dtype=DTYPES[weight],
            seed=seed,
            step=step,
            number=number,
        )
        bits = formats.stream(values.size, seed, step, number)
        with np.errstate(all="ignore"):
            wanted = formats.encode(values, format, bits, weight)
        numbers = formats.decode(wanted, format, weight)
        for part, want in zip(parts, wanted, strict=True):
            found = raw(part).view(want.dtype)
            if format in WITHOUT_ROWS and want.size == values.size:  # codes of NaN mean nothing
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

# The kernels' name, the dtype of its array, the format for numbers that fit, and of the mantissa.
STOCHASTIC = {
    "bfloat16_stochastic": (torch.bfloat16, reference.FORMATS["bfloat16"]),
    "float16_stochastic": (torch.float16, reference.FORMATS["float16"]),
    "ue8m8": (torch.int16, formats.UE8M8),
}


def stored(device: str, x: np.ndarray, native: str, **random: int) -> np.ndarray:
    data = torch.empty(x.size, dtype=STOCHASTIC[native][0], device=device)
    _C.encode_(torch.from_numpy(x).to(device), data, None, native, **random)
    return array(_C.decode(data, None, native))


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
    steps, format = 400, STOCHASTIC[native][1]
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
    weight, rest = amp.formats.encode(x, "split32")
    return {
        "format": (
            lambda: amp.formats.encode(x, "int4"),
            ValueError,
            r"format must be one of split32, split24, .*ue8m8, log8; found 'int4'",
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
            "weight_dtype must be torch.bfloat16 or torch.float16, found torch.float32",
        ),
        "groups": (
            lambda: amp.formats.encode(x, "m8"),
            ValueError,
            r"m8 stores groups of 32; x has 33 elements, shape \(33,\)",
        ),
        "groups of squares": (
            lambda: amp.formats.encode(x, "log8"),
            ValueError,
            r"log8 stores groups of 32; x has 33 elements, shape \(33,\)",
        ),
        "one array of groups": (
            lambda: amp.formats.decode((torch.zeros(32, dtype=torch.uint8),), "log8"),
            ValueError,
            r"log8 has 2 array\(s\), found 1",
        ),
        "cubes are not written any more": (
            lambda: amp.formats.encode(torch.zeros(32), "m8_cubed"),
            ValueError,
            "format must be one of .*; found 'm8_cubed'",
        ),
        "one array": (
            lambda: amp.formats.decode((weight,), "split32"),
            ValueError,
            r"split32 has 2 array\(s\), found 1",
        ),
        "two arrays": (
            lambda: amp.formats.decode((weight, rest), "bfloat16"),
            ValueError,
            r"bfloat16 has 1 array\(s\), found 2",
        ),
        "other remainder": (
            lambda: amp.formats.decode((weight, rest), "split24"),
            ValueError,
            "split24 is a low-precision weight and a remainder, found dtypes torch.bfloat16 and "
            "torch.int16",
        ),
        "float32 weight": (
            lambda: amp.formats.decode((x, rest), "split32"),
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
            "rest .*must have 2 elements of 2 bytes",
        ),
    }


@pytest.mark.parametrize("case", api_errors())
def test_what_is_no_format_is_refused_by_name(case: str) -> None:
    act, kind, message = api_errors()[case]
    with pytest.raises(kind, match=message):
        act()


# Optimizers.


def test_ten_thousand_exact_steps_are_float32_masters_steps(device: str) -> None:
    numbers = {"lr": 1e-3, "weight_decay": 0.1}
    start = torch.from_numpy(random(2000, 1)).bfloat16().to(device)
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    plain, exact = (
        amp.optim.AdamW([p], **STORAGES[storage], **numbers)
        for p, storage in zip(params, ("float32", "exact"), strict=True)
    )
    grads = [torch.from_numpy(random(2000, s, 1e-2)).bfloat16().to(device) for s in range(97)]
    for step in range(10_000):
        for param, optimizer in zip(params, (plain, exact), strict=True):
            param.grad = grads[step % len(grads)]
            optimizer.step()
    one, two = plain.state[params[0]], exact.state[params[1]]
    assert_same(found_master(two, params[1], "split32"), array(one["master"]), "master")
    for name in ("exp_avg", "exp_avg_sq"):
        assert_same(array(two[name]), array(one[name]), name)
    # the weights differ where the master lies half way, and nowhere else
    master = array(one["master"]).view(np.uint32)
    ties = master & 0xFFFF == 0x8000
    assert_same(array(params[1])[~ties], array(params[0])[~ties], "weights")


@pytest.mark.parametrize("format", SQUARES)
def test_the_second_moment_follows_a_gradient_that_drops(device: str, format: str) -> None:
    """Nearest rounding would stay at the old value: .999 of a number is the same number.

    The mean is right. Single elements scatter, by what docs/formats.md says and a tenth.
    """
    count, beta2 = (128, 32), 0.999
    param = nn.Parameter(torch.zeros(count, device=device))
    optimizer = amp.optim.AdamW([param], lr=0.0, betas=(0.9, beta2), exp_avg_sq=format)
    generator = torch.Generator().manual_seed(1)
    pool = [torch.randn(count, generator=generator).to(device) for _ in range(500)]
    wanted = torch.zeros(count, dtype=torch.float64, device=device)
    for step in range(3000 + 2800):
        param.grad = pool[step % 500] * (1.0 if step < 3000 else 0.1)
        wanted.mul_(beta2).add_(param.grad.double().square(), alpha=1 - beta2)
        optimizer.step()
    found = found_state(optimizer.state[param], "exp_avg_sq", format).astype(np.float64)
    ratio = found / wanted.cpu().numpy().reshape(-1)
    assert ratio.mean() == pytest.approx(1, abs=0.02)
    spread = {"float32": 1e-3, "ue8m8": 0.07, "log8": 0.37}[format]
    assert spread / 2 <= ratio.std() <= spread or format == "float32"


@pytest.mark.parametrize("format", MOMENTS)
def test_the_first_moment_of_a_constant_gradient_is_right(device: str, format: str) -> None:
    """Averaged over steps and elements, for elements of a group that are 1, 1/8, 1/1000 of it.

    A step's bias, ten times over with beta1 = .9: bfloat16's probabilities are 256ths of an ulp of
    2^-7. m8's numbers from code 2^k on are 3/2^k apart at most, and the mean is too large between
    two of them with a power of two between, by .375 / 2^k at most and by 2/3 of that on average. A
    moment that scatters by a step and more is there a third of the time. A step's deviation is an
    ulp / 2 or 3/2 / 2^k, 1 / sqrt(1 - .81) of it stationary; five of these, ten steps counting as
    one.
    """
    steps, sizes = 200, np.float32([1, 1 / 8, 1 / 1000])
    columns = np.repeat(sizes, [11, 11, 10])
    grad = torch.from_numpy(np.tile(columns, (512, 1))).to(device)
    param = nn.Parameter(torch.zeros_like(grad))
    optimizer = amp.optim.AdamW([param], lr=0.0, betas=(0.9, 0.999), exp_avg=format)
    total = np.zeros((512, 32))
    for step in range(steps):
        param.grad = grad
        optimizer.step()
        state = optimizer.state[param]
        if step >= steps // 2:
            values = found_state(state, "exp_avg", format).reshape(512, 32)
            total += values / (1 - 0.9 ** (step + 1))
    ratio = total / (steps // 2) / columns
    for size in sizes:
        chosen = ratio[:, columns == size]
        octave = 2.0 ** -np.floor(np.log2(126 * np.cbrt(size)))
        bias, deviation = {
            "float32": (2.0**-23, 2.0**-23),
            "bfloat16": (2.0**-7 / 512, 2.0**-8),
            "m8": (0.375 * octave * 2 / 3 / 3, 1.5 * octave),
        }[format]
        tolerance = 10 * bias + 5 * deviation / np.sqrt(0.19 * chosen.size * steps / 20)
        assert chosen.mean() == pytest.approx(1, abs=tolerance), size


@pytest.mark.parametrize("memory", MEMORIES)
def test_an_element_without_gradient_comes_to_rest(device: str, memory: str) -> None:
    """Half of the elements of two rows stop, and two whole rows."""
    param = nn.Parameter(torch.from_numpy(random(128, 1)).bfloat16().to(device).view(4, 32))
    optimizer = amp.optim.AdamW([param], lr=1e-3, weight_decay=0.0, memory=memory)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(4, 32, generator=generator).bfloat16().to(device) for _ in range(50)]
    stops = torch.ones(4, 32, dtype=torch.bool, device=device)
    stops[:2, ::2] = False
    for step in range(500):
        param.grad = grads[step % 50]
        optimizer.step()
    rest = [grad.masked_fill(stops, 0.0) for grad in grads]
    seen = []
    for step in range(20_000):
        param.grad = rest[step % 50]
        optimizer.step()
        if step >= 20_000 - 100:
            master = found_master(optimizer.state[param], param, PRESETS[memory][0])
            seen.append(master.reshape(4, 32))
    still, moving = stops.cpu().numpy(), ~stops.cpu().numpy()
    assert all(np.array_equal(master[still], seen[0][still]) for master in seen)
    assert (seen[0][moving] != seen[-1][moving]).all()


def test_a_shard_draws_what_its_elements_draw_in_the_whole(device: str) -> None:
    """Parts that begin anywhere, given where, and the same number."""

    new_clock = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64, device=device)

    def step(cuts: list[int], firsts: list[int]) -> list[np.ndarray]:
        def parts(x: Tensor) -> list[Tensor]:
            return [p.clone() for p in x.to(device).tensor_split(cuts)]

        params = [nn.Parameter(p) for p in parts(torch.from_numpy(random(1000, 1)).bfloat16())]
        count = len(params)
        rests = parts(torch.zeros(1000, dtype=torch.int8))
        moments = parts(torch.from_numpy(random(1000, 2, 1e-3)).bfloat16())
        squares = parts(torch.full((1000,), 0x3F00, dtype=torch.int16))
        slots = _C.Slots(
            params=params,
            masters=rests,
            states=[moments, squares],
            scales=[[None] * count] * 2,
            formats=[["bfloat16_stochastic"] * count, ["ue8m8"] * count],
            stochastic=[False] * count,
            clocks=[new_clock.clone() for _ in params],
            groups=[0] * count,
            tensor_indices=[5] * count,
            firsts=firsts,
            names=[f"part {i}" for i in range(count)],
        )
        hyper = _C.Hyper(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, seed=11)
        verdict = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0], dtype=torch.float64, device=device)
        grad = torch.from_numpy(random(1000, 3)).bfloat16()
        for _ in range(3):
            for param, part in zip(params, parts(grad), strict=True):
                param.grad = part
            _C.operators["adamw_"](slots, [hyper], verdict)
        return [np.concatenate([raw(p) for p in t]) for t in (params, rests, moments, squares)]

    whole = step([], [0])
    for a, b in zip(whole, step([37], [0, 37]), strict=True):
        assert np.array_equal(a, b)
    elsewhere = step([37], [0, 36])
    assert not np.array_equal(whole[2], elsewhere[2])


@pytest.mark.parametrize(
    ("memory", "wanted"),
    [(None, 12), ("float32", 14), ("exact", 12), ("lean", 7), ("tiny", 6.0625), ("micro", 5.09375)],
)
def test_memory_is_what_the_storages_take(device: str, memory: str | None, wanted: float) -> None:
    param = nn.Parameter(torch.ones(1024, 1024, dtype=torch.bfloat16, device=device))
    optimizer = amp.optim.AdamW([param], memory=memory)
    assert optimizer.memory_report().bytes_per_parameter == 2
    param.grad = torch.ones_like(param)
    optimizer.step()
    report = optimizer.memory_report()
    assert report.bytes_per_parameter == pytest.approx(wanted, abs=0.01)
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in (param, param.grad, *optimizer.state[param].values())
    }
    assert report.total == sum(storages.values())
    assert report.parameters == param.numel()
    assert f"{report.bytes_per_parameter:.3f} beside the gradient" in str(report)


def test_steps_that_are_skipped_and_tensors_without_gradient_draw_nothing(device: str) -> None:
    """Bits depend on a parameter's number and its applied steps, on nothing that comes between."""
    kind, numbers = RULES["adamw"]
    unused, used = (nn.Parameter(torch.ones(100, device=device).bfloat16()) for _ in range(2))
    optimizer = kind([unused, used], **numbers, memory="lean", check_overflow=True, seed=3)
    want = Expected("adamw", used, 1, optimizer.rule().names, memory="lean", seed=3)
    for step in range(6):
        used.grad = torch.from_numpy(random(100, step, 1e-2)).bfloat16().to(device)
        if step % 2:
            used.grad[step] = torch.inf
        else:
            want.step(array(used.grad), np.float32(1))
        optimizer.step()
        assert optimizer.step_was_skipped == bool(step % 2)
    for name, values in want.states.items():
        assert_same(found_state(optimizer.state[used], name, want.formats[name]), values, name)


# Checkpoints.


def small_model(device: str) -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 33), nn.Tanh(), nn.Linear(33, 5)).to(device)
    return amp.prepare(net, torch.bfloat16)


def some_steps(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> float:
    """Returns how far a weight has gone in one of them, at most."""
    largest = 0.0
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        before = [p.detach().clone() for p in net.parameters()]
        for param in net.parameters():
            grad = torch.randn(param.shape, generator=generator) * 0.1
            param.grad = grad.bfloat16().to(param.device, param.dtype)
        optimizer.step()
        gone = [(p.detach() - b).abs().max() for p, b in zip(net.parameters(), before, strict=True)]
        largest = max(largest, *(float(x) for x in gone))
    return largest


def through_a_file(device: str, value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True, map_location=device)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("memory", [*MEMORIES, "no master"])
def test_resuming_gives_the_same_bits(device: str, rule: str, memory: str) -> None:
    """Into an optimizer with a seed of its own, which the file's replaces."""
    kind, numbers = RULES[rule]
    storage = {"memory": memory}
    if memory == "no master":
        storage = {"master": "none", "rounding": "stochastic"}

    def fresh(seed: int) -> tuple[nn.Module, amp.optim.FusedOptimizer]:
        net = small_model(device)
        return net, kind(net.parameters(), **numbers, **storage, seed=seed, max_grad_norm=1.0)

    whole, optimizer = fresh(2**35 + 7)
    some_steps(whole, optimizer, range(3))
    saved = {"model": whole.state_dict(), "optimizer": optimizer.state_dict()}
    saved = through_a_file(device, saved)
    some_steps(whole, optimizer, range(3, 6))
    resumed, again = fresh(0)
    some_steps(resumed, again, range(2))  # a state that is there already is replaced
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    before = raw_bytes(saved)
    some_steps(resumed, again, range(3, 6))
    assert raw_bytes(saved) == before, "stepping must not write into the loaded dictionary"
    assert raw_bytes(resumed.state_dict()) == raw_bytes(whole.state_dict())
    assert raw_bytes(again.state_dict()) == raw_bytes(optimizer.state_dict())


@pytest.mark.parametrize("source", STORAGES)
@pytest.mark.parametrize("target", STORAGES)
def test_loading_converts_to_the_formats_asked_for(device: str, source: str, target: str) -> None:
    """What was saved, decoded, encoded with the bits of step 0; the same formats byte for byte."""
    rule, seed = "adamw", 9

    def fresh(storage: str, seed: int) -> tuple[nn.Module, amp.optim.FusedOptimizer]:
        net, arguments = small_model(device), {**RULES[rule][1], **STORAGES[storage]}
        return net, amp.optim.AdamW(net.parameters(), **arguments, seed=seed)

    net, optimizer = fresh(source, seed)
    some_steps(net, optimizer, range(3))
    loaded, other = fresh(target, 0)
    loaded.load_state_dict(net.state_dict())
    other.load_state_dict(through_a_file(device, optimizer.state_dict()))
    for number, (a, b) in enumerate(zip(net.parameters(), loaded.parameters(), strict=True)):
        wanted = [
            Expected(rule, p, number, other.rule().names, **STORAGES[storage])
            for p, storage in ((a, source), (b, target))
        ]
        for name in other.rule().names:
            values = found_state(optimizer.state[a], name, wanted[0].formats[name])
            format = wanted[1].formats[name]
            if format not in ("float32", wanted[0].formats[name]):
                bits = formats.stream(values.size, seed, 0, number)
                values = formats.decode(formats.encode(values, format, bits), format)
            assert_same(found_state(other.state[b], name, format), values, name)
        master = found_master(optimizer.state[a], a, wanted[0].formats["master"])
        split = wanted[1].formats["master"]
        if split != "float32":
            parts = formats.encode(master, split, weight="bfloat16")
            master = formats.decode(parts, split, "bfloat16")
        assert_same(found_master(other.state[b], b, split), master, "master")
        assert raw_bytes([*other.state[b].values()]) == raw_bytes(
            [*optimizer.state[a].values()]
        ) or (source != target)
    some_steps(loaded, other, range(3, 4))


# Ours and torch's that read each other's checkpoints.
TORCHS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "adamw": (amp.optim.AdamW, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "amsgrad": (amp.optim.AdamW, torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "adam": (amp.optim.Adam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "adadelta": (amp.optim.Adadelta, torch.optim.Adadelta, {"weight_decay": 0.1}),
    "nadam": (amp.optim.NAdam, torch.optim.NAdam, {"lr": 1e-2, "momentum_decay": 0.1}),
    "radam": (amp.optim.RAdam, torch.optim.RAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    "adagrad": (amp.optim.Adagrad, torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
    "rmsprop": (amp.optim.RMSprop, torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9}),
    "centered": (amp.optim.RMSprop, torch.optim.RMSprop, {"lr": 1e-2, "centered": True}),
    "momentum": (amp.optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
}


def assert_alike(optimizer: Any, low: nn.Module, wide: nn.Module, update: float) -> None:
    """Five steps after they were: within 8 roundings a step, of the weight and of its update."""
    found = amp.float32_state_dict(low, optimizer)
    for name, weight in wide.state_dict().items():
        tolerance = 5 * 8 * 2.0**-24
        torch.testing.assert_close(found[name], weight, rtol=tolerance, atol=tolerance * update)


@pytest.mark.parametrize("name", TORCHS)
def test_exact_continues_from_a_torch_checkpoint_and_back(device: str, name: str) -> None:
    ours, torchs, arguments = TORCHS[name]
    torch.manual_seed(1)
    wide = nn.Sequential(nn.Linear(64, 33), nn.Tanh(), nn.Linear(33, 5)).to(device)
    theirs = torchs(wide.parameters(), **arguments)
    some_steps(wide, theirs, range(5))

    low = amp.prepare(copy.deepcopy(wide), torch.bfloat16)  # keeps the exact originals
    mine = ours(low.parameters(), **arguments, memory="exact")
    mine.load_state_dict(through_a_file(device, theirs.state_dict()))
    update = some_steps(wide, theirs, range(5, 10))
    some_steps(low, mine, range(5, 10))
    assert_alike(mine, low, wide, update)

    back = copy.deepcopy(wide)
    back.load_state_dict(amp.float32_state_dict(low, mine))
    again = torchs(back.parameters(), **arguments)
    again.load_state_dict(through_a_file(device, mine.torch_state_dict()))
    update = some_steps(back, again, range(10, 15))
    some_steps(low, mine, range(10, 15))
    assert_alike(mine, low, back, update)


@pytest.mark.parametrize("memory", ["lean", "tiny", "micro"])
def test_torch_reads_what_compact_formats_hold(device: str, memory: str) -> None:
    net = small_model(device)
    optimizer = amp.optim.AdamW(net.parameters(), memory=memory)
    some_steps(net, optimizer, range(3))
    wide = nn.Sequential(nn.Linear(64, 33), nn.Tanh(), nn.Linear(33, 5)).to(device)
    wide.load_state_dict(amp.float32_state_dict(net, optimizer))
    theirs = torch.optim.AdamW(wide.parameters())
    theirs.load_state_dict(optimizer.torch_state_dict())
    for number, (a, b) in enumerate(zip(net.parameters(), wide.parameters(), strict=True)):
        formats_ = Expected("adamw", a, number, optimizer.rule().names, memory=memory).formats
        assert_same(found_master(optimizer.state[a], a, "split24"), array(b).reshape(-1), "master")
        assert theirs.state[b]["step"].item() == 3
        for name in optimizer.rule().names:
            found = array(theirs.state[b][name]).reshape(-1)
            assert_same(found, found_state(optimizer.state[a], name, formats_[name]), name)
    some_steps(wide, theirs, range(3, 4))


@pytest.mark.parametrize("storage", STORAGES)
def test_float32_weights_go_out_and_in(device: str, storage: str) -> None:
    """Any float32 weights with float32 and split32 masters, their own with all."""
    net, other = small_model(device), small_model(device)
    arguments = {"lr": 0.1, **STORAGES[storage]}
    optimizers = [amp.optim.AdamW(n.parameters(), **arguments) for n in (net, other)]
    some_steps(net, optimizers[0], range(3))
    weights = amp.float32_state_dict(net, optimizers[0])
    assert {w.dtype for w in weights.values()} == {torch.float32}
    amp.load_float32_state_dict(other, optimizers[1], weights)
    assert raw_bytes(amp.float32_state_dict(other, optimizers[1])) == raw_bytes(weights)
    assert raw_bytes(other.state_dict()) == raw_bytes(net.state_dict())
    if storage in ("float32", "exact"):
        generator = torch.Generator().manual_seed(0)
        weights = {n: torch.randn(w.shape, generator=generator) for n, w in weights.items()}
        amp.load_float32_state_dict(other, optimizers[1], weights)
        assert raw_bytes(amp.float32_state_dict(other, optimizers[1])) == raw_bytes(weights)
    some_steps(other, optimizers[1], range(3, 4))


@pytest.mark.parametrize("memory", MEMORIES)
def test_empty_frozen_and_unused_parameters_are_left_alone(device: str, memory: str) -> None:
    shapes = ((0, 32), (2, 32), (2, 32), (2, 32))
    empty, frozen, unused, used = (
        nn.Parameter(torch.ones(shape, dtype=torch.bfloat16, device=device)) for shape in shapes
    )
    frozen.requires_grad_(False)
    optimizer = amp.optim.AdamW([empty, frozen, unused, used], lr=0.1, memory=memory)
    optimizer.step()
    assert not optimizer.state
    empty.grad, used.grad = torch.ones_like(empty), torch.ones_like(used)
    optimizer.step()
    assert (frozen == 1).all()
    assert (unused == 1).all()
    assert (used != 1).all()
    assert unused not in optimizer.state
    again = amp.optim.AdamW([empty, frozen, unused, used], lr=0.1, memory=memory)
    again.load_state_dict(through_a_file(device, optimizer.state_dict()))
    assert raw_bytes(again.state_dict()) == raw_bytes(optimizer.state_dict())


# Arguments.


def test_groups_have_their_own_formats(device: str) -> None:
    params = [nn.Parameter(torch.ones(4, 32, dtype=torch.bfloat16, device=device)) for _ in "abcd"]
    optimizer = amp.optim.AdamW(
        [
            {"params": params[0]},
            {"params": params[1], "master": "float32", "exp_avg": "float32"},
        ],
        memory="tiny",
    )
    optimizer.add_param_group({"params": params[2], "memory": "lean"})
    optimizer.add_param_group({"params": params[3], "exp_avg_sq": "float16_root"})
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    found = [
        {
            name: str(tensor.dtype).removeprefix("torch.")
            for name, tensor in optimizer.state[p].items()
            if tensor.shape == p.shape
        }
        for p in params
    ]
    assert found == [
        {"remainder8": "int8", "exp_avg_m8v2": "int8", "exp_avg_sq_ue8m8": "int16"},
        {"master": "float32", "exp_avg": "float32", "exp_avg_sq_ue8m8": "int16"},
        {"remainder8": "int8", "exp_avg": "bfloat16", "exp_avg_sq_ue8m8": "int16"},
        {"remainder8": "int8", "exp_avg_m8v2": "int8", "exp_avg_sq_root": "float16"},
    ]
    assert "memory" not in optimizer.param_groups[2]


def argument_errors() -> dict[str, tuple[Callable[[Any], Any], type, str]]:
    adamw = amp.optim.AdamW
    return {
        "memory": (
            lambda p: adamw(p, memory="huge"),
            ValueError,
            "memory must be one of float32, exact, lean, tiny, micro; found 'huge'",
        ),
        "rounding": (
            lambda p: adamw(p, rounding="up"),
            ValueError,
            "rounding must be one of nearest, stochastic; found 'up'",
        ),
        "unknown": (
            lambda p: adamw(p, momory="lean"),
            TypeError,
            "AdamW has no argument 'momory'.*memory",
        ),
        "differentiable": (
            lambda p: adamw(p, differentiable=True),
            ValueError,
            "differentiable=True is not there",
        ),
        "squares in codes": (
            lambda p: adamw(p, exp_avg_sq="m8"),
            ValueError,
            "exp_avg_sq must be one of float32, float16, bfloat16, float16_root, ue8m8, log8",
        ),
        "moments without sign": (
            lambda p: amp.optim.Lion(p, exp_avg="ue8m8"),
            ValueError,
            "exp_avg must be one of float32, float16, bfloat16, m8",
        ),
        "variance": (
            lambda p: amp.optim.RMSprop(p, centered=True, square_avg="ue8m8"),
            ValueError,
            'square_avg must be "float32" if centered',
        ),
        "later group": (
            lambda p: adamw(p).add_param_group(
                {"params": [nn.Parameter(torch.zeros(1))], "memory": "huge"}
            ),
            ValueError,
            "memory must be one of",
        ),
    }


@pytest.mark.parametrize("case", argument_errors())
def test_arguments_that_cannot_be_are_refused_by_name(case: str) -> None:
    act, kind, message = argument_errors()[case]
    with pytest.raises(kind, match=message):
        act([nn.Parameter(torch.zeros(4, 32))])


@pytest.mark.parametrize("storage", ["float32", "exact"])
def test_a_torch_checkpoint_loaded_after_the_weights_keeps_their_masters(
    device: str, storage: str
) -> None:
    torch.manual_seed(0)
    whole = nn.Linear(40, 8, device=device)
    theirs = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    whole(torch.randn(4, 40, device=device)).square().sum().backward()
    theirs.step()
    low = amp.prepare(nn.Linear(40, 8, device=device), torch.bfloat16)
    ours = amp.optim.AdamW(low.parameters(), lr=1e-3, **STORAGES[storage])
    amp.load_float32_state_dict(low, ours, whole.state_dict())
    ours.load_state_dict(theirs.state_dict())
    for name, value in amp.float32_state_dict(low, ours).items():
        assert torch.equal(value, whole.state_dict()[name])


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5])
def test_a_seed_that_is_none_is_refused(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"seed must be a whole number of \[0, 2\^64\)"):
        amp.optim.SGD([nn.Parameter(torch.zeros(1))], seed=seed)


def test_a_negative_zero_is_a_zero_in_ue8m8(device: str) -> None:
    parts = amp.formats.encode(torch.tensor([-0.0, 0.0], device=device), "ue8m8")
    assert amp.formats.decode(parts, "ue8m8").tolist() == [0.0, 0.0]
