"""What instructions on floats do to a warp: float32, conversions, float64.

Rounding is to nearest. The results of MUFU, approximations on a GPU, are rounded here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sass import Instruction
from sass_integers import effect, joined, split_outputs
from sass_operands import Kind, Operand
from sass_warp import LANES, UnknownError, Warp

Floats = NDArray[np.float32]
_SMALLEST = np.finfo(np.float32).tiny
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    **{"LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal},
    **{"EQ": np.equal, "NE": lambda x, y: (x < y) | (x > y)},
    "NAN": lambda x, y: np.isnan(x) | np.isnan(y),
    "NUM": lambda x, y: ~(np.isnan(x) | np.isnan(y)),
}
# With a U behind it a comparison is true for NaN too.
_COMPARE |= {
    f"{how}U": lambda x, y, f=f: f(x, y) | np.isnan(x) | np.isnan(y)
    for how, f in list(_COMPARE.items())[:6]
}


def flushed(x: Floats, i: Instruction) -> Floats:
    """`x` with zeros for subnormal numbers, where the instruction asks for it."""
    if "FTZ" not in i.modifiers:
        return x
    return np.where(np.abs(x) < _SMALLEST, np.copysign(np.float32(0), x), x)


def _finish(w: Warp, i: Instruction, to: Operand, x: Floats) -> None:
    x = flushed(x.astype(np.float32), i)
    w.set(to, np.clip(x, 0, 1) if "SAT" in i.modifiers else x)


def fused(a: Floats, b: Floats, c: Floats, rounding: frozenset[str] = frozenset()) -> Floats:
    """a * b + c, rounded once: to nearest, or down (RM), up (RP) or towards zero (RZ)."""
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + addend
    # Where the sum in float64 is not exact, the odd one of its two neighbours is taken: only so
    # does the second rounding see on which side of a tie the exact result lies.
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    away = (lost > 0) == (total > 0)
    odd = np.where((bits & 1) == 1, bits, np.where(away, bits + 1, bits - 1))
    is_odd = np.isfinite(total) & (lost != 0) & (total != 0)
    exact = np.where(is_odd, odd.view(np.float64), total)
    near = exact.astype(np.float32)
    over = near.astype(np.float64) - exact
    if "RZ" in rounding:
        return np.where(over * np.sign(exact) > 0, np.nextafter(near, np.float32(0)), near)
    if "RM" in rounding:
        return np.where(over > 0, np.nextafter(near, np.float32(-np.inf)), near)
    if "RP" in rounding:
        return np.where(over < 0, np.nextafter(near, np.float32(np.inf)), near)
    return near


@effect("FADD FMUL FFMA", "FTZ SAT RM RP RZ")
def _arithmetic(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    to, *given = operands
    x = [flushed(w.f32(one), i) for one in given[:3]]
    if i.name == "FADD":
        x = [x[0], np.ones_like(x[0]), x[1]]
    if i.name == "FMUL":
        x.append(np.full_like(x[0], -0.0))  # adds nothing, not even a sign
    _finish(w, i, to, fused(x[0], x[1], x[2], i.modifiers & {"RM", "RP", "RZ"}))


@effect("HFMA2", "MMA")
def _hfma2(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    # As nvcc loads a constant: zero times zero plus two halves. Nothing else is known here.
    to, a, b, *halves = operands
    if not (a.name.endswith("RZ") and b.name.endswith("RZ") and all(h.decimal for h in halves)):
        raise UnknownError
    high, low = (np.array(float(h.decimal), np.float16).view(np.uint16) for h in halves)
    w.set(to, np.full(LANES, int(high) << 16 | int(low), np.uint32))


@effect("FMNMX", "NAN FTZ")
def _fmnmx(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    to, a, b, which = operands
    x, y, least = w.f32(a), w.f32(b), w.predicate(which)
    if "NAN" in i.modifiers:
        value = np.where(least, np.minimum(x, y), np.maximum(x, y))
    else:
        value = np.where(least, np.fmin(x, y), np.fmax(x, y))
    _finish(w, i, to, value)


@effect("FSEL", "FTZ")
def _fsel(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    to, a, b, which = operands
    w.set(to, np.where(w.predicate(which), w.f32(a), w.f32(b)))


@effect("FSETP", f"{' '.join(_COMPARE)} FTZ AND OR XOR")
def _fsetp(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    _compare(w, i, operands, [flushed(w.f32(one), i) for one in operands[2:4]])


@effect("DSETP", f"{' '.join(_COMPARE)} AND OR XOR")
def _dsetp(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    _compare(w, i, operands, [w.f64(one) for one in operands[2:4]])


def _compare(
    w: Warp, i: Instruction, operands: Sequence[Operand], x: Sequence[NDArray[Any]]
) -> None:
    (how,) = i.modifiers & set(_COMPARE)
    value, other = _COMPARE[how](*x), w.predicate(operands[4])
    w.set_predicate(operands[0], joined(i.modifiers, value, other))
    w.set_predicate(operands[1], joined(i.modifiers, ~value, other))


@effect("FCHK")
def _fchk(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    # Whether a quotient needs the slow way: by exponents, with room for every step between.
    a, b = w.f32(operands[1]), w.f32(operands[2])
    exponents = [np.frexp(np.abs(x))[1] for x in (a, b)]
    normal = [np.isfinite(x) & (np.abs(x) >= _SMALLEST) for x in (a, b)]
    far = (np.abs(exponents[0] - exponents[1]) > 124) | (np.abs(exponents[1]) > 124)
    w.set_predicate(operands[0], ~normal[0] | ~normal[1] | (exponents[0] < -100) | far)


@effect("MUFU", "RCP RSQ SQRT")
def _mufu(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    x = w.f32(operands[1]).astype(np.float64)
    (how,) = i.modifiers
    w.set(operands[0], {"RCP": 1 / x, "RSQ": x**-0.5, "SQRT": x**0.5}[how].astype(np.float32))


@effect("HADD2", "F32")
def _hadd2(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    # As conversion of a half to float32; nothing else is known here.
    to, zero, half = operands
    if "F32" not in i.modifiers or not zero.name.endswith("RZ"):
        raise UnknownError
    w.set(to, _part(w, half).astype(np.uint16).view(np.float16).astype(np.float32))


def _part(w: Warp, operand: Operand, bits: int = 16) -> NDArray[np.uint32]:
    """The byte or half that an operand means; the lowest where it does not say."""
    place = int(operand.part[1]) if operand.part[:1] in ("B", "H") else 0
    size = 8 if operand.part.startswith("B") or (bits == 8 and not operand.part) else 16
    return w.raw(operand.name) >> np.uint32(place * size) & np.uint32((1 << bits) - 1)


@effect("I2F I2FP", "S8 U8 S16 U16 S32 U32 S64 U64 F32 F64 RP")
def _i2f(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    to, given = operands
    kind = next((m for m in i.modifiers if m[0] in "SU"), "S32")
    bits = int(kind[1:])
    if "RP" in i.modifiers or given.kind is not Kind.REGISTER:
        raise UnknownError
    if bits == 64:
        value = w.u64(given)
        value = value.view(np.int64) if kind[0] == "S" else value
    else:
        word = w.u32(given) if bits == 32 else _part(w, given, bits)
        value = word.astype(np.int64)
        if kind[0] == "S":
            value = np.where(value >> (bits - 1), value - (1 << bits), value)
    if "F64" in i.modifiers:
        w.set64(to, value.astype(np.float64))
    else:
        w.set(to, value.astype(np.float32))


@effect("F2I", "S32 U32 S64 U64 F64 TRUNC FLOOR CEIL NTZ FTZ")
def _f2i(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    to, given = operands
    kind = next((m for m in i.modifiers if m in ("U32", "S64", "U64")), "S32")
    x = w.f64(given) if "F64" in i.modifiers else w.f32(given).astype(np.float64)
    x = _rounded(x, i)
    bits = int(kind[1:])
    low, high = (0, 2.0**bits) if kind[0] == "U" else (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1))
    x = np.clip(np.nan_to_num(x), low, np.nextafter(high, 0))
    whole = x.astype(np.uint64) if kind == "U64" else x.astype(np.int64)
    if bits == 64:
        w.set64(to, whole)
    else:
        w.set(to, whole)


def _rounded(x: NDArray[Any], i: Instruction) -> NDArray[Any]:
    how = {"TRUNC": np.trunc, "FLOOR": np.floor, "CEIL": np.ceil}
    return next((how[m] for m in i.modifiers if m in how), np.rint)(x)


@effect("FRND", "TRUNC FLOOR CEIL")
def _frnd(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    w.set(operands[0], _rounded(w.f32(operands[1]), i))


@effect("F2F", "F32 F64")
def _f2f(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    to, given = operands
    if i.opcode.endswith("F32.F64"):
        w.set(to, w.f64(given).astype(np.float32))
    else:
        w.set64(to, w.f32(given).astype(np.float64))


@effect("F2FP", "F16 BF16 F32 PACK_AB")
def _f2fp(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    # Two floats as two halves of a word, the first above the second.
    words = []
    for one in operands[1:3]:
        x = w.f32(one)
        if "BF16" in i.modifiers:
            bits = x.view(np.uint32)
            up = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
            words.append(np.where(np.isnan(x), np.uint32(0x7FFF), up >> np.uint32(16)))
        else:
            words.append(x.astype(np.float16).view(np.uint16).astype(np.uint32))
    w.set(operands[0], words[0] << np.uint32(16) | words[1])


@effect("DADD DMUL DFMA")
def _doubles(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    to, carries, given = split_outputs(operands)
    x = [w.f64(one) for one in given[:3]]
    if carries or i.name == "DFMA":
        raise UnknownError
    w.set64(to, x[0] + x[1] if i.name == "DADD" else x[0] * x[1])
