"""What integer, logical and predicate instructions do to a warp (sass_warp.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sass import Instruction
from sass_operands import Kind, Operand
from sass_warp import LANES, Mask, UnknownError, Warp

Effect = Callable[[Warp, Instruction, Sequence[Operand]], None]
# By opcode: what it does and the modifiers that this is right for; None for any.
EFFECTS: dict[str, tuple[Effect, frozenset[str] | None]] = {}
WORD = np.uint64(0xFFFFFFFF)
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    **{"LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal},
    **{"EQ": np.equal, "NE": np.not_equal},
}


def effect(names: str, modifiers: str | None = "") -> Callable[[Effect], Effect]:
    """Registers what opcodes do; those of the uniform data path too, which begin with a U."""

    def register(function: Effect) -> Effect:
        allowed = None if modifiers is None else frozenset(modifiers.split())
        for name in names.split():
            EFFECTS[name] = EFFECTS[f"U{name}"] = (function, allowed)
        return function

    return register


def split_outputs(operands: Sequence[Operand]) -> tuple[Operand, list[Operand], list[Operand]]:
    """The destination, predicates written beside it, and the sources."""
    n = 1
    while operands[n].kind is Kind.PREDICATE:
        n += 1
    return operands[0], list(operands[1:n]), list(operands[n:])


def joined(how: frozenset[str], value: Mask, other: Mask) -> Mask:
    """`value` AND, OR or XOR `other`, as an instruction's modifiers say."""
    return value | other if "OR" in how else value ^ other if "XOR" in how else value & other


def _carries(w: Warp, operands: Sequence[Operand]) -> NDArray[np.uint64]:
    total = np.zeros(LANES, np.uint64)
    for one in operands:
        total += w.predicate(one).astype(np.uint64)
    return total


def _addend(w: Warp, operand: Operand) -> NDArray[np.uint64]:
    # A negated operand is inverted and one is added, which carries for zero.
    value = w.bits(operand).astype(np.uint64)
    if operand.negated:
        return np.uint64(1 << 32) - value
    return value ^ WORD if operand.inverted else value


@effect("IADD3", "X")
def _iadd3(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    to, carries, given = split_outputs(operands)
    total = sum((_addend(w, one) for one in given[:3]), np.zeros(LANES, np.uint64))
    total += _carries(w, given[3:])
    w.set(to, total & WORD)
    for n, one in enumerate(carries):
        w.set_predicate(one, total >> np.uint64(32) > n)


@effect("IMAD", "MOV U32 SHL IADD X WIDE HI")
def _imad(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    to, carries, (a, b, c, *extra) = split_outputs(operands)
    unsigned, wide = "U32" in i.modifiers, bool({"WIDE", "HI"} & i.modifiers)
    if not wide:
        total = w.u32(a).astype(np.uint64) * w.u32(b) + _addend(w, c) + _carries(w, extra)
        w.set(to, total & WORD)
        if carries:
            raise UnknownError
        return
    x, y = [w.u32(o).astype(np.uint64) if unsigned else w.s32(o).view(np.uint64) for o in (a, b)]
    z = w.u64(c)
    product = x * y
    total = product + z + _carries(w, extra)
    if "HI" in i.modifiers:
        w.set(to, total >> np.uint64(32))
    else:
        w.set64(to, total)
    for one in carries:
        w.set_predicate(one, total < product)


@effect("LEA", "HI X SX32")
def _lea(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    to, carries, (a, b, *rest) = split_outputs(operands)
    low = w.u32(a).astype(np.uint64)
    if "HI" in i.modifiers:
        if "SX32" in i.modifiers:
            low = w.s32(a).view(np.uint64)
        else:
            low |= w.u32(rest.pop(0)).astype(np.uint64) << np.uint64(32)
        shifted = low << w.u32(rest.pop(0)).astype(np.uint64) >> np.uint64(32)
    else:
        shifted = low << w.u32(rest.pop(0)).astype(np.uint64) & WORD
    total = shifted + _addend(w, b) + _carries(w, rest)
    w.set(to, total & WORD)
    for one in carries:
        w.set_predicate(one, total >> np.uint64(32) > 0)


@effect("SHF", "L R U32 S32 U64 S64 HI W")
def _shf(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    to, a, by, c = operands
    pair = w.u32(a).astype(np.uint64) | w.u32(c).astype(np.uint64) << np.uint64(32)
    most, last = (63, 63) if {"U64", "S64"} & i.modifiers else (32, 31)
    n = w.u32(by).astype(np.uint64)
    n = n & np.uint64(last) if "W" in i.modifiers else np.minimum(n, np.uint64(most))
    if "L" in i.modifiers:
        pair = pair << n
    elif {"S32", "S64"} & i.modifiers:
        pair = (pair.view(np.int64) >> n.view(np.int64)).view(np.uint64)
    else:
        pair = pair >> n
    w.set(to, pair >> np.uint64(32) if "HI" in i.modifiers else pair & WORD)


def look_up(table: int, a: NDArray[Any], b: NDArray[Any], c: NDArray[Any]) -> NDArray[Any]:
    """The logical function of three inputs that `table` lists."""
    total = a & ~a
    for k in range(8):
        if table >> k & 1:
            total = total | ((a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c))
    return total


@effect("LOP3", "LUT PAND")
def _lop3(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    to_predicate = operands[0] if operands[0].kind is Kind.PREDICATE else None
    to, a, b, c, table, *given = operands[1:] if to_predicate else operands
    value = look_up(table.value, w.u32(a), w.u32(b), w.u32(c))
    w.set(to, value)
    if to_predicate:
        other = w.predicate(given[0])
        is_set = value != 0
        w.set_predicate(to_predicate, is_set & other if "PAND" in i.modifiers else is_set | other)


@effect("PLOP3", "LUT")
def _plop3(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    to, second, a, b, c, table, other = operands
    given = [w.predicate(one) for one in (a, b, c)]
    w.set_predicate(to, look_up(table.value, *given))
    w.set_predicate(second, look_up(other.value, *given))


@effect("ISETP", "LT LE GT GE EQ NE U32 AND OR XOR EX")
def _isetp(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    to, second, a, b, other, *low = operands
    x, y = (w.u32(a), w.u32(b)) if "U32" in i.modifiers else (w.s32(a), w.s32(b))
    (how,) = i.modifiers & set(_COMPARE)
    value = _COMPARE[how](x, y)
    if "EX" in i.modifiers:  # the upper halves of a comparison of 64 bits
        below = w.predicate(low[0])
        value = value & (x != y) | (x == y) & below if how != "NE" else value | below
        if how == "EQ":
            value = (x == y) & below
    w.set_predicate(to, joined(i.modifiers, value, w.predicate(other)))
    w.set_predicate(second, joined(i.modifiers, ~value, w.predicate(other)))


@effect("SEL")
def _sel(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    to, a, b, which = operands
    w.set(to, np.where(w.predicate(which), w.u32(a), w.u32(b)))


@effect("MOV R2UR", "FILL")
def _mov(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    value = w.u32(operands[1])
    if i.name == "R2UR":
        value = np.full(LANES, value[np.argmax(w.running)])
    w.set(operands[0], value)


@effect("VIADD")
def _viadd(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    w.set(operands[0], w.u32(operands[1]) + w.u32(operands[2]))


@effect("VIMNMX VIMNMX3 VIADDMNMX", "U32 RELU")
def _vimnmx(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    to, predicates, (*given, which) = split_outputs(operands)
    unsigned = "U32" in i.modifiers
    values = [w.u32(o).astype(np.int64) if unsigned else w.s32(o) for o in given]
    if i.name.endswith("VIADDMNMX"):
        total = (values[0] + values[1]).astype(np.uint32)
        values = [total.astype(np.int64) if unsigned else total.view(np.int32), values[2]]
    least, smallest = w.predicate(which), values[0]
    for other in values[1:]:
        smallest = np.where(least, np.minimum(smallest, other), np.maximum(smallest, other))
    w.set(to, np.maximum(smallest, 0) if "RELU" in i.modifiers else smallest)
    for one in predicates:  # whether the second operand was taken, in all code seen so far
        if not least.all() or len(values) != 2:
            raise UnknownError
        w.set_predicate(one, values[0] >= values[1])


@effect("PRMT")
def _prmt(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    to, a, selector, c = operands
    pair = w.u32(a).astype(np.uint64) | w.u32(c).astype(np.uint64) << np.uint64(32)
    choice, total = w.u32(selector).astype(np.uint64), np.zeros(LANES, np.uint64)
    for k in range(4):
        one = choice >> np.uint64(4 * k)
        byte = pair >> (one & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
        sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
        total |= np.where(one & np.uint64(8), sign, byte) << np.uint64(8 * k)
    w.set(to, total)


def _byte_of(operand: Operand) -> int:
    return 8 * int(operand.part[1]) if operand.part.startswith("B") else 0


def _marked(operand: Operand) -> list[int]:
    return [n for n in range(7) if operand.value >> n & 1]


@effect("P2R", "B1 B2 B3")
def _p2r(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    to, _, old, mask = operands
    shift = next((8 * int(m[1]) for m in i.modifiers), 0)
    value = w.u32(old) & ~np.uint32(mask.value << shift)
    for n in _marked(mask):
        value = value | w.predicate(f"P{n}").astype(np.uint32) << np.uint32(n + shift)
    w.set(to, value)


@effect("R2P")
def _r2p(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    _, given, mask = operands
    value = w.raw(given.name) >> np.uint32(_byte_of(given))
    for n in _marked(mask):
        w.set_predicate(Operand(Kind.PREDICATE, f"P{n}"), (value >> np.uint32(n) & 1).astype(bool))
