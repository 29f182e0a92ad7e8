"""Stored formats: every conversion against the definition of the numbers."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from helpers import DTYPES, array, assert_same, interesting_floats, on

from amp_mp import _C

LOW = ("float16", "bfloat16")


@pytest.mark.parametrize("name", LOW)
@pytest.mark.parametrize("saturating", [False, True], ids=["ieee", "saturating"])
def test_encoding_rounds_to_nearest_even(device: str, name: str, saturating: bool) -> None:
    x = interesting_floats()
    to = torch.empty(x.size, dtype=DTYPES[name], device=device)
    _C.copy_([to], [on(device, x, torch.float32)], saturate=saturating)
    assert_same(array(to), reference.store(x, name, saturating=saturating), name)


@pytest.mark.parametrize("name", LOW)
def test_every_nan_is_stored_as_one(device: str, name: str) -> None:
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0xFF800001, 0x7FC12345], dtype=np.uint32)
    to = torch.empty(bits.size * 16, dtype=DTYPES[name], device=device)
    _C.copy_([to], [on(device, np.repeat(bits, 16).view(np.float32), torch.float32)])
    canonical = 0x7E00 if name == "float16" else 0x7FC0
    assert set((to.cpu().view(torch.int16).int() & 0xFFFF).tolist()) == {canonical}


@pytest.mark.parametrize("name", LOW)
def test_decoding_is_exact_for_all_65536_patterns(device: str, name: str) -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    low = patterns.view(DTYPES[name]).to(device)
    to = torch.empty(low.numel(), device=device)
    _C.copy_([to], [low])
    bits = patterns.numpy().view(np.uint16)
    wanted = (
        bits.view(np.float16).astype(np.float32)
        if name == "float16"
        else (bits.astype(np.uint32) << 16).view(np.float32)
    )
    assert_same(array(to), wanted, name)


@pytest.mark.parametrize("flush", [False, True], ids=["kept", "flushed"])
def test_float16_has_the_same_bits_where_denormals_are_flushed(flush: bool) -> None:
    """Every pattern decoded and every kind of float32 encoded, to the bit, NaNs included."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    halves = torch.from_numpy(patterns.view(np.int16)).view(torch.float16)
    floats = torch.from_numpy(interesting_floats())
    wide, low = torch.empty(halves.numel()), torch.empty(floats.numel(), dtype=torch.float16)
    if not torch.set_flush_denormal(flush) and flush:
        pytest.fail("this processor cannot flush denormals")
    try:
        _C.copy_([wide], [halves])
        _C.copy_([low], [floats])
    finally:
        torch.set_flush_denormal(False)
    # A NaN keeps its payload and becomes a quiet one; encoded, it becomes 0x7E00.
    nan = (patterns & 0x7FFF) > 0x7C00
    payload = (patterns.astype(np.uint32) & 0x3FF) << 13
    quiet = ((patterns.astype(np.uint32) & 0x8000) << 16) | 0x7FC00000 | payload
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = patterns.view(np.float16).astype(np.float32).view(np.uint32)
        rounded = floats.numpy().astype(np.float16)
    np.testing.assert_array_equal(wide.numpy().view(np.uint32), np.where(nan, quiet, wanted))
    bits = np.where(np.isnan(rounded), np.uint16(0x7E00), rounded.view(np.uint16))
    np.testing.assert_array_equal(low.numpy().view(np.uint16), bits)


def test_the_reference_agrees_with_numpy_and_torch() -> None:
    x = interesting_floats()
    with np.errstate(over="ignore", invalid="ignore"):
        assert_same(
            reference.store(x, "float16", saturating=False),
            x.astype(np.float16).astype(np.float32),
            "float16",
        )
    torchs = torch.from_numpy(x).bfloat16().float().numpy()
    assert_same(reference.store(x, "bfloat16", saturating=False), torchs, "bfloat16")


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_copies_multiply_in_float32_and_round_once(
    device: str, source: str, target: str, shift: int
) -> None:
    sizes = [0, 1, 7, 8, 63, 64, 65, 257, 5000]
    factor = 1 / 3
    values = [np.linspace(-70000, 70000, n, dtype=np.float32) for n in sizes]
    from_ = [on(device, v, DTYPES[source], shift) for v in values]
    to = [torch.zeros(n + shift, dtype=DTYPES[target], device=device)[shift:] for n in sizes]
    _C.copy_(to, from_, multiplier=factor)
    for t, f in zip(to, from_, strict=True):
        with np.errstate(over="ignore"):
            product = array(f) * np.float32(factor)
        assert_same(array(t), reference.store(product, target, saturating=False), "copy")
