"""Machine code is read and run as a GPU would: nvdisasm's listing, 32 lanes, waits for the memory.

The oracle is NumPy: small kernels (kernels/small.cu) are compiled by nvcc and run by sass_run.py.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import kernel_report
import numpy as np
import pytest
from kernel_path import last_iteration
from numpy.typing import NDArray
from sass import NO_BARRIER, Function, disassemble, parse
from sass_floats import fused
from sass_operands import Kind, parse_operands
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


@pytest.mark.slow
def test_shared_memory_and_doubles(small: Mapping[str, Function]) -> None:
    x, out = LANE.astype(np.int32) * 7, np.zeros(32, np.int32)
    launch(small["reversed"], x, out)
    assert (out == x[::-1]).all()
    y = np.random.default_rng(0).normal(size=32) * 1e3
    sums = np.zeros(32)
    launch(small["doubles"], y, sums)
    assert (sums == (y * 3).astype(np.float32).astype(np.float64) + np.trunc(y)).all()


@pytest.mark.slow
def test_a_branch_on_what_is_not_known_is_named(small: Mapping[str, Function]) -> None:
    x, out = np.ones(32, np.float32), np.zeros(32, np.float32)
    trace = launch(small["cosine"], x, out)
    assert len(trace.guesses) == 1
    assert "EXIT" in trace.guesses[0]
    assert "not known" in trace.guesses[0]


@pytest.mark.slow
def test_an_address_without_memory_is_an_error(small: Mapping[str, Function]) -> None:
    short, out = np.ones(16, np.float32), np.zeros(32, np.float32)
    with pytest.raises(RuntimeError, match=r"LDG.*no memory is known at 0x100000 to 0x100080"):
        launch(small["cosine"], short, out)


LISTING = """\
.text._Z4goodv:
        /*0000*/                   LDC R1, c[0x0][0x28] ;                /* 0x00000a00ff017b82 */
                                                                         /* 0x000fe20000000800 */
        /*0010*/              @!P4 LDG.E.128 R24, desc[UR8][R32.64+0x10] ;  /* 0x0000001020188981 */
                                                                         /* 0x000ea2000c1e1d00 */
.L_x_1:
        /*0020*/               @P0 BRA P5, `(.L_x_1) ;                   /* 0x0000000000000947 */
                                                                         /* 0x008fea0002800000 */
        /*0030*/                   NOP;                                  /* 0x0000000000007918 */
                                                                         /* 0x000fc00000000000 */
.text._Z3badPf:
        /*0000*/                   FADD R1, |R2|, -R3.reuse ;            /* 0x8000000302017221 */
                                                                         /* 0x000fe20000000200 */
"""


def test_a_listing_is_read() -> None:
    functions = parse(LISTING)
    good = functions["_Z4goodv"]
    assert list(functions) == ["_Z4goodv", "_Z3badPf"]
    assert [str(one) for one in good.instructions] == [
        "0x0000: LDC R1, c[0x0][0x28]",
        "0x0010: @!P4 LDG.E.128 R24, desc[UR8][R32.64+0x10]",
        "0x0020: @P0 BRA P5, `(.L_x_1)",
        "0x0030: NOP",
    ]
    assert good.labels == {".L_x_1": 2}
    assert good.index_at[0x20] == 2
    load, jump = good.instructions[1:3]
    assert (load.name, load.modifiers, load.guard) == ("LDG", {"E", "128"}, "!P4")
    # By the bits from 105 on: stall, yield, barrier when written, when read, barriers waited for.
    assert (load.control.stall, load.control.written, load.control.read) == (1, 2, NO_BARRIER)
    assert (jump.control.stall, jump.control.waits) == (5, 8)
    with pytest.raises(ValueError, match="no control word behind"):
        parse("\n".join(LISTING.splitlines()[:2]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("R5", {"kind": Kind.REGISTER, "name": "R5"}),
        ("-R5.reuse", {"kind": Kind.REGISTER, "name": "R5", "negated": True}),
        ("~UR4", {"kind": Kind.REGISTER, "name": "UR4", "inverted": True}),
        ("-|R7|", {"name": "R7", "negated": True, "absolute": True}),
        ("R36.B1", {"name": "R36", "part": "B1"}),
        ("!UPT", {"kind": Kind.PREDICATE, "name": "UPT", "inverted": True}),
        ("-0x7f", {"kind": Kind.NUMBER, "value": 0xFFFFFF81}),
        ("+INF ", {"kind": Kind.NUMBER, "decimal": "+INF"}),
        ("c[0x0][R4+-0x10]", {"kind": Kind.CONSTANT, "registers": ("R4",), "value": -0x10}),
        ("desc[UR8][R2.64+UR4+0x10]", {"registers": ("R2", "UR4"), "value": 16, "wide": True}),
        ("[R1+0x8]", {"kind": Kind.ADDRESS, "registers": ("R1",), "wide": False}),
        ("`(.L_x_5)", {"kind": Kind.LABEL, "name": ".L_x_5"}),
        ("SR_TID.X", {"kind": Kind.NAME, "name": "SR_TID.X"}),
    ],
)
def test_operands_are_read(text: str, expected: dict[str, object]) -> None:
    first, second = parse_operands(f"{text}, R9")
    assert {name: getattr(first, name) for name in expected} == expected
    assert second.name == "R9"


def test_a_product_and_sum_are_rounded_once() -> None:
    # The product lies between two floats; what decides is lost in a sum in float64.
    tie, bit = np.float32([1 + 2**-12]), np.float32([2**-70])
    above, below = fused(tie, tie, bit), fused(tie, tie, -bit)
    assert above[0] - below[0] == np.float32(2**-23)
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, (3, 4000), np.uint32)
    bits = bits & np.uint32(0x81FFFFFF) | np.uint32(0x3E000000)
    a, b, c = bits.view(np.float32)
    c[::3] = (-a * b)[::3]  # most of it cancels
    found = fused(a, b, c)
    down = fused(a, b, c, frozenset({"RM"}))
    for k in range(len(a)):
        exact = Fraction(float(a[k])) * Fraction(float(b[k])) + Fraction(float(c[k]))
        near = float(found[k])
        step = abs(float(np.nextafter(found[k], np.float32(np.inf))) - near)
        assert abs(Fraction(near) - exact) <= Fraction(step) / 2, k
        above = float(np.nextafter(down[k], np.float32(np.inf)))
        assert Fraction(float(down[k])) <= exact < Fraction(above), k
