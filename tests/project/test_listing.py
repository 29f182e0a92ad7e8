"""nvdisasm's listing is read: instructions, control words, operands. And a fused sum is exact."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from sass import NO_BARRIER, parse
from sass_floats import fused
from sass_operands import Kind, parse_operands

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
