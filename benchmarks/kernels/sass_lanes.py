"""What instructions between lanes, of special registers and of memory do to a warp."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sass import Instruction
from sass_integers import effect, split_outputs
from sass_operands import Kind, Operand
from sass_warp import LANES, UnknownError, Warp, next_register

LOADS = {"LDG": "global", "LD": "global", "LDS": "shared", "LDL": "local"}
STORES = {"STG": "global", "ST": "global", "STS": "shared", "STL": "local"}


def size_of(i: Instruction) -> int:
    """Bytes that an instruction loads or stores in each lane."""
    for name, size in (("128", 16), ("64", 8), ("U8", 1), ("S8", 1), ("U16", 2), ("S16", 2)):
        if name in i.modifiers:
            return size
    return 4


@effect("S2R S2UR")
def _special(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    numbers = {
        "SR_TID.X": w.lane + np.uint32(w.first_thread),
        "SR_CTAID.X": np.full(LANES, w.block, np.uint32),
        "SR_LANEID": w.lane,
        "SR_LTMASK": (np.uint64(1) << w.lane.astype(np.uint64)) - np.uint64(1),
    }
    zeros = {f"SR_{what}.{axis}" for what in ("TID", "CTAID") for axis in "YZ"}
    name = operands[1].name
    if name in zeros or name == "SR_CgaCtaId":
        w.set(operands[0], np.zeros(LANES, np.uint32))
    elif name in numbers:
        w.set(operands[0], numbers[name])
    else:
        raise UnknownError


@effect("CS2R", "32")
def _cs2r(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    if operands[1].name != "SRZ":
        raise UnknownError
    w.set(operands[0], np.zeros(LANES, np.uint32))
    if "32" not in i.modifiers:
        w.set(next_register(operands[0].name), np.zeros(LANES, np.uint32))


def _ballot(votes: NDArray[np.bool_]) -> int:
    return int(sum(1 << n for n in np.flatnonzero(votes)))


@effect("VOTE VOTEU", "ANY ALL EQ")
def _vote(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    *outputs, given = operands
    votes = w.predicate(given) & w.running
    whole = {"ANY": votes.any(), "ALL": bool((votes == w.running).all())}
    whole["EQ"] = whole["ALL"] or not whole["ANY"]
    (how,) = i.modifiers
    for one in outputs:
        if one.kind is Kind.PREDICATE:
            w.set_predicate(one, np.full(LANES, whole[how]))
        else:
            w.set(one, np.full(LANES, _ballot(votes), np.uint64))


@effect("SHFL", "IDX UP DOWN BFLY")
def _shfl(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    within, to, given, by, limits = operands
    value, n, limit = w.u32(given), w.u32(by).astype(np.int64) & 31, w.u32(limits)
    clamp, segment = (limit & np.uint32(31)).astype(np.int64), (limit >> np.uint32(8)) & 31
    lane, part = w.lane.astype(np.int64), segment.astype(np.int64)
    first = lane & part
    last = first | (clamp & ~part & 31)
    if "UP" in i.modifiers:
        source = lane - n
        fits = source >= last
    else:
        how = {"IDX": first | (n & ~part & 31), "DOWN": lane + n, "BFLY": lane ^ n}
        source = next(how[m] for m in i.modifiers)
        fits = source <= last
    source = np.where(fits, source, lane)
    w.set(to, value[source])
    w.set_predicate(within, fits)


@effect("REDUX", "OR AND SUM MIN MAX S32")
def _redux(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    signed = "S32" in i.modifiers
    given = w.s32(operands[1]) if signed else w.u32(operands[1]).astype(np.int64)
    how = {"OR": np.bitwise_or, "AND": np.bitwise_and, "MIN": np.minimum, "MAX": np.maximum}
    function = next((how[m] for m in i.modifiers if m in how), np.add)
    total = function.reduce(given[w.running])
    w.set(operands[0], np.full(LANES, int(total) & 0xFFFFFFFF, np.uint64))


@effect("POPC FLO BREV", "U32 SH")
def _count(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    given = w.u32(operands[1])
    if i.name.endswith("POPC"):
        numbers = [int(x).bit_count() for x in given]
    elif i.name.endswith("BREV"):
        numbers = [int(f"{int(x):032b}"[::-1], 2) for x in given]
    elif "U32" not in i.modifiers:
        raise UnknownError
    else:
        numbers = [int(x).bit_length() - 1 for x in given]
        if "SH" in i.modifiers:
            numbers = [31 - n if n >= 0 else n for n in numbers]
    w.set(operands[0], np.array(numbers, np.int64))


@effect("LDC", "U8 S8 U16 S16 64")
def _ldc(w: Warp, i: Instruction, operands: Sequence[Operand]) -> None:
    size = size_of(i)
    value = w.constant_of(operands[1], size)
    if {"S8", "S16"} & i.modifiers:
        value = np.where(value >> np.uint64(8 * size - 1), value - (1 << 8 * size), value)
    w.set(operands[0], value & np.uint64(0xFFFFFFFF))
    if size == 8:
        w.set(next_register(operands[0].name), value >> np.uint64(32))


def load(w: Warp, i: Instruction, operands: Sequence[Operand]) -> NDArray[np.uint64]:
    """Carries out a load; the addresses that the running lanes read."""
    to, _, (place, *_) = split_outputs(operands)
    size, space = size_of(i), LOADS[i.name]
    asked = w.address(place)
    if space == "global":
        found = w.memory.read(asked, size)
    elif space == "local":
        found = w.local.read(w.local_address(asked), size)
    else:
        found = w.shared.read(asked, size)
        if not w.shared_is_known.read(asked, size).all():
            raise UnknownError
    rows = np.zeros((LANES, max(size, 4)), np.uint8)
    rows[w.running, :size] = found
    words = rows.view(np.uint32)
    if "S8" in i.modifiers:
        words = rows[:, 0].view(np.int8).astype(np.int32).view(np.uint32)[:, None]
    if "S16" in i.modifiers:
        words = rows[:, :2].copy().view(np.int16).astype(np.int32).view(np.uint32)
    for n in range(words.shape[1]):
        w.set(next_register(to.name, n), words[:, n])
    return asked


def store(w: Warp, i: Instruction, operands: Sequence[Operand]) -> NDArray[np.uint64]:
    """Carries out a store; the addresses that the running lanes write."""
    place, given = operands[:2]
    size, space = size_of(i), STORES[i.name]
    asked = w.address(place)
    names = [next_register(given.name, n) for n in range(max(size // 4, 1))]
    rows = np.stack([w.raw(name) for name in names], axis=1).view(np.uint8)[w.running, :size]
    if space == "global":
        w.memory.write(asked, rows)
    elif space == "local":
        w.local.write(w.local_address(asked), rows)
    else:
        w.shared.write(asked, rows)
        w.shared_is_known.write(asked, np.ones_like(rows))
    return asked
