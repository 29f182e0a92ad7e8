"""Operands of machine instructions, from the text that nvdisasm prints."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What an operand is."""

    REGISTER = "register"  # R or UR, RZ and URZ too
    PREDICATE = "predicate"  # P or UP, PT and UPT too
    NUMBER = "number"  # a literal
    CONSTANT = "constant"  # c[bank][address]
    ADDRESS = "address"  # [address] of memory
    LABEL = "label"
    NAME = "name"  # of a special register, a barrier, ...


@dataclass(frozen=True)
class Operand:
    """One operand. `name` is a register's, predicate's, label's or special register's."""

    kind: Kind
    name: str = ""
    value: int = 0  # literal as 32 bits; offset of an address
    bank: int = 0  # of a constant
    registers: tuple[str, ...] = ()  # whose sum, with `value`, is the address
    wide: bool = False  # the first of these registers is a pair of 64 bits
    part: str = ""  # "B1", "H0_H0": which part of a register is meant
    negated: bool = False
    inverted: bool = False  # "~" of a register, "!" of a predicate
    absolute: bool = False
    decimal: str = ""  # a literal that is not hexadecimal: a float in float instructions


_COMMA = re.compile(r",(?![^\[(]*[\])])")
_REGISTER = re.compile(r"^(U?R(?:\d+|Z))((?:\.\w+)*)$")
_PREDICATE = re.compile(r"^U?P(?:\d|T)$")
_CONSTANT = re.compile(r"^c\[0x([0-9a-f]+)\]\[(.*)\]$")
_LITERAL = re.compile(r"^(-?)0x([0-9a-f]+)$")
_DECIMAL = re.compile(r"^[+-]?(\d[\d.e+-]*|INF|QNAN|SNAN)$")


def parse_operands(text: str) -> list[Operand]:
    """Operands from the text behind an opcode."""
    text = re.sub(r'\(\*".*?"\*\)', "", text).strip()
    return [_parse(one.strip()) for one in _COMMA.split(text)] if text else []


def _parse(text: str) -> Operand:
    if found := re.match(r"^`\((.*)\)$", text):
        return Operand(Kind.LABEL, found[1])
    if text.endswith("]") and not text.lstrip("-~|").startswith("c["):
        return _address(text)
    if found := _LITERAL.match(text):
        value = -int(found[2], 16) if found[1] else int(found[2], 16)
        return Operand(Kind.NUMBER, value=value & 0xFFFFFFFF)
    if _DECIMAL.match(text):
        return Operand(Kind.NUMBER, value=_integer(text), decimal=text)
    negated, inverted, absolute = False, False, False
    if text.startswith("!"):
        inverted, text = True, text[1:]
    if text.startswith("-"):
        negated, text = True, text[1:]
    if text.startswith("~"):
        inverted, text = True, text[1:]
    if text.startswith("|"):
        absolute, text = True, text.replace("|", "")
    signs = {"negated": negated, "inverted": inverted, "absolute": absolute}
    if _PREDICATE.match(text):
        return Operand(Kind.PREDICATE, text, **signs)
    if found := _REGISTER.match(text):
        part = found[2].replace(".reuse", "").strip(".")
        return Operand(Kind.REGISTER, found[1], part=part, **signs)
    if found := _CONSTANT.match(text.replace(".reuse", "")):
        registers, offset, _ = _sum(found[2])
        return Operand(
            Kind.CONSTANT, value=offset, bank=int(found[1], 16), registers=registers, **signs
        )
    return Operand(Kind.NAME, text, **signs)


def _address(text: str) -> Operand:
    inside = text[text.rindex("[") + 1 : -1]  # desc[..][address] names a descriptor first
    registers, offset, wide = _sum(inside)
    return Operand(Kind.ADDRESS, value=offset, registers=registers, wide=wide)


def _sum(text: str) -> tuple[tuple[str, ...], int, bool]:
    """Registers, offset, and whether the first register is a pair."""
    registers, offset, wide = [], 0, False
    for term in text.split("+"):
        if found := _LITERAL.match(term):
            offset += -int(found[2], 16) if found[1] else int(found[2], 16)
        elif found := _REGISTER.match(term):
            wide = wide or (not registers and ".64" in found[2])
            registers.append(found[1])
        elif term:
            raise ValueError(f"a term of an address that is not known: {term!r} in {text!r}")
    return tuple(registers), offset, wide


def _integer(text: str) -> int:
    """A decimal literal as an integer; 0 where it is not one."""
    return int(text) & 0xFFFFFFFF if re.match(r"^[+-]?\d+$", text) else 0


def float_bits(decimal: str) -> int:
    """The bits of a literal in a float instruction."""
    plain = decimal.lstrip("+-")
    number = {"INF": float("inf"), "QNAN": float("nan"), "SNAN": float("nan")}.get(plain)
    value = float(plain) if number is None else number
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits | 0x80000000 if decimal.startswith("-") else bits


def double_bits(decimal: str) -> int:
    """The upper half of a literal in an instruction of float64; its lower half is zero."""
    plain = decimal.lstrip("+-")
    number = {"INF": float("inf"), "QNAN": float("nan")}.get(plain)
    value = float(plain) if number is None else number
    bits = struct.unpack("<Q", struct.pack("<d", value))[0] >> 32
    return bits | 0x80000000 if decimal.startswith("-") else bits
