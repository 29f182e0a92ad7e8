"""Machine code is run as a GPU would: 32 lanes, branches, memory, and waits for it.

The oracle is NumPy: small kernels (kernels/small.cu) are compiled by nvcc and run by sass_run.py.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

import kernel_report
import numpy as np
import pytest
from kernel_path import last_iteration
from numpy.typing import NDArray
from sass import Function, disassemble
from sass_run import Trace, run
from sass_time import CACHED, cycles, rounds, stalls
from sass_warp import Memory, Warp

LANE = np.arange(32)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Function]:
    """The small kernels by name."""
    nvcc = kernel_report.find_nvcc()
    if nvcc is None or (reason := kernel_report.why_no_paths()):
        pytest.skip(f"no machine code: {reason if nvcc else kernel_report.NO_NVCC}")
    cubin = tmp_path_factory.mktemp("small") / "small.cubin"
    source = Path(__file__).resolve().parent / "kernels/small.cu"
    flags = [*kernel_report.FLAGS, "-gencode", "arch=compute_90,code=sm_90", "-cubin"]
    subprocess.run([nvcc, *flags, "-o", str(cubin), str(source)], check=True)
    return disassemble(cubin)


def launch(code: Function, *arguments: NDArray[np.generic] | int) -> Trace:
    """Runs a warp with arrays, which it writes to, and integers of 8 bytes."""
    memory, packed = Memory({}), b""
    for n, argument in enumerate(arguments, 1):
        if isinstance(argument, int):
            packed += struct.pack("<q", argument)
        else:
            memory.add(n << 20, argument.view(np.uint8))
            packed += struct.pack("<Q", n << 20)
    return run(code, Warp(packed, memory, 32))


def loop_of(code: Function, trace: Trace) -> list[tuple[object, object]]:
    return [(code.instructions[one.index], one) for one in last_iteration(code, trace)]


@pytest.mark.full
@pytest.mark.slow
def test_two_dependent_loads_are_two_rounds(small: Mapping[str, Function]) -> None:
    data = np.arange(128, dtype=np.uint32) * 3
    addresses = (2 << 20) + 4 * np.random.default_rng(0).permutation(128).astype(np.uint64)
    out = np.zeros(128, np.uint32)
    code = small["chase"]
    memory = Memory({1 << 20: addresses.view(np.uint8), 2 << 20: data.view(np.uint8)})
    memory.add(3 << 20, out.view(np.uint8))
    trace = run(code, Warp(struct.pack("<QQi", 1 << 20, 3 << 20, 4), memory, 32))
    loaded = data[(addresses.astype(np.int64) - (2 << 20)) // 4].reshape(4, 32)
    assert (out.reshape(4, 32) == np.cumsum(loaded, axis=0)).all()
    assert trace.guesses == []
    loop = loop_of(code, trace)
    assert rounds(loop) == 2
    assert [i.name for i, _ in loop].count("LDG") == 2
    assert cycles(loop, 1000) > 2000 > cycles(loop, 500) > stalls(loop)


@pytest.mark.full
@pytest.mark.slow
def test_two_loads_at_once_are_one_round(small: Mapping[str, Function]) -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 128)).astype(np.float32)
    out = np.zeros(128, np.float32)
    code = small["add"]
    trace = launch(code, x, y, out, 4)
    assert (out == x + y).all()
    loop = loop_of(code, trace)
    assert rounds(loop) == 1
    # What was read before is in the cache.
    again = launch(code, x, y, out, 1)
    assert not any(one.cached for one in again.steps)
    for _, one in loop:
        one.cached = True
    assert rounds(loop) == 0
    assert cycles(loop, 1e9) < 4 * CACHED


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("rare", [False, True], ids=["usual numbers", "rare numbers"])
def test_lanes_part_and_meet_again(small: Mapping[str, Function], rare: bool) -> None:
    x = (1 + LANE * 1.7).astype(np.float32)
    if rare:
        x[[0, 3, 6, 9, 12]] = [0, 1e-42, -1, np.inf, 1e-38]
    out = np.zeros(33, np.float32)
    trace = launch(small["lanes"], x, out)

    def collatz(k: int) -> int:
        return 0 if k == 1 else 1 + collatz(3 * k + 1 if k % 2 else k // 2)

    with np.errstate(invalid="ignore"):
        t = np.where(LANE % 3 == 0, np.sqrt(x) / np.float32(3), x * 2 + np.float32(1))
    t = (t + t[LANE ^ 1]).astype(np.float32)
    assert out[32] == t[5]  # written by one lane
    leading = [32 - int(n).bit_length() for n in LANE + 1]
    for addend in (16, [collatz(int(n) + 1) for n in LANE], 4, leading):
        t = t + np.array(addend, np.float32)
    assert np.array_equal(out[:32], t, equal_nan=True)
    assert bool(trace.guesses) == rare
    assert all("a subroutine is called" in guess for guess in trace.guesses)


@pytest.mark.full
@pytest.mark.slow
def test_integers_of_64_bits(small: Mapping[str, Function]) -> None:
    x = np.random.default_rng(0).integers(-(2**62), 2**62, 32)
    x[:4] = [0, -1, 1 << 32, -(1 << 32)]
    out = np.zeros(32, np.int64)
    trace = launch(small["integers"], x, out, 12345678901)

    def wrapped(n: int, bits: int = 64) -> int:
        n &= (1 << bits) - 1
        return n - (1 << bits) if n >> (bits - 1) else n

    for lane in range(32):
        a, b = int(x[lane]), int(x[31 - lane])
        r = a * b + 12345678901 + ((a % 2**64) >> (b & 63))
        r = wrapped(r) ^ (a >> 7)
        r -= wrapped(a << 3) if a < b else b
        r += min(wrapped(a, 32), wrapped(b, 32)) * max(a % 2**32, b % 2**32)
        assert out[lane] == wrapped(r), lane
    assert trace.guesses == []


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("uniform", [True, False], ids=["together", "apart"])
def test_cases_of_a_switch(small: Mapping[str, Function], uniform: bool) -> None:
    code = small["switched"]
    assert any(i.name == "BRX" for i in code.instructions)
    x = (1 + np.random.default_rng(0).random(32) * 9).astype(np.float32)
    u = x[::-1]
    grown = x.copy()
    for lane in range(32):
        for _ in range(int(np.ceil(u[lane]))):
            grown[lane] *= np.float32(1.5)
    results = np.stack(
        [
            *(np.sqrt(x), x / u, np.fmin(u, x) + np.float32(3), grown, np.floor(x)),
            *(u - x, u * np.float32(7), np.ones_like(x), np.ones_like(x)),
        ]
    )
    for shift in range(9):
        cases = ((LANE * (not uniform) + shift) % 9).astype(np.int32)
        out = np.zeros(32, np.float32)
        trace = launch(code, cases, x, out)
        assert (out == results[cases, LANE]).all()
        assert trace.guesses == []


@pytest.mark.full
@pytest.mark.slow
def test_shared_memory_and_doubles(small: Mapping[str, Function]) -> None:
    x, out = LANE.astype(np.int32) * 7, np.zeros(32, np.int32)
    launch(small["reversed"], x, out)
    assert (out == x[::-1]).all()
    y = np.random.default_rng(0).normal(size=32) * 1e3
    sums = np.zeros(32)
    launch(small["doubles"], y, sums)
    assert (sums == (y * 3).astype(np.float32).astype(np.float64) + np.trunc(y)).all()


@pytest.mark.full
@pytest.mark.slow
def test_a_branch_on_what_is_not_known_is_named(small: Mapping[str, Function]) -> None:
    x, out = np.ones(32, np.float32), np.zeros(32, np.float32)
    trace = launch(small["cosine"], x, out)
    assert len(trace.guesses) == 1
    assert "EXIT" in trace.guesses[0]
    assert "not known" in trace.guesses[0]


@pytest.mark.full
@pytest.mark.slow
def test_an_address_without_memory_is_an_error(small: Mapping[str, Function]) -> None:
    short, out = np.ones(16, np.float32), np.zeros(32, np.float32)
    with pytest.raises(RuntimeError, match=r"LDG.*no memory is known at 0x100000 to 0x100080"):
        launch(small["cosine"], short, out)
