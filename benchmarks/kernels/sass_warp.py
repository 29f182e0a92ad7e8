"""The state of one warp that runs machine code: registers, predicates and memory of 32 lanes.

A register of which nothing is known holds None; so does a predicate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from sass_operands import Kind, Operand, double_bits, float_bits

LANES = 32
ALL = np.ones(LANES, bool)
ARGUMENTS_AT = 0x210  # in constant bank 0, of sm_90
# Also there: a block's and a grid's threads, the stack, the arguments' address, a descriptor.
_BLOCK_AT, _GRID_AT, _STACK_AT, _WINDOW_AT, _DESCRIPTOR_AT = 0x0, 0xC, 0x28, 0x198, 0x208
_WINDOW = 1 << 52  # where no process has memory
_LOCAL = 1 << 14  # bytes of local memory of a lane
_SHARED = 1 << 16

Words = NDArray[np.uint32]
Mask = NDArray[np.bool_]


class UnknownError(Exception):
    """An operand that nothing is known of."""


class Memory:
    """Bytes of a process at their own addresses."""

    def __init__(self, ranges: dict[int, NDArray[np.uint8]]) -> None:
        self._ranges = [(at, at + len(stored), stored) for at, stored in sorted(ranges.items())]

    def add(self, address: int, stored: NDArray[np.uint8]) -> None:
        """Adds bytes that begin at an address."""
        self._ranges.append((address, address + len(stored), stored))

    def read(self, addresses: NDArray[np.uint64], size: int) -> NDArray[np.uint8]:
        """`size` bytes at each address. Raises IndexError where there is no memory."""
        stored, places = self._find(addresses, size)
        return stored[places]

    def write(self, addresses: NDArray[np.uint64], values: NDArray[np.uint8]) -> None:
        """Writes a row of `values` at each address."""
        stored, places = self._find(addresses, values.shape[1])
        stored[places] = values

    def _find(
        self, addresses: NDArray[np.uint64], size: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        low, high = int(addresses.min()), int(addresses.max()) + size
        for begin, end, stored in self._ranges:
            if begin <= low and high <= end:
                starts = (addresses - np.uint64(begin)).astype(np.int64)
                return stored, starts[:, None] + np.arange(size)
        raise IndexError(f"no memory is known at {low:#x} to {high:#x}")


@dataclass
class Warp:
    """One warp of a block of `threads`."""

    arguments: bytes
    memory: Memory
    threads: int
    blocks: int = 1
    first_thread: int = 0
    block: int = 0
    banks: Mapping[int, bytes] = field(default_factory=dict)  # of constants, but for bank 0
    registers: dict[str, Words | None] = field(default_factory=dict)
    predicates: dict[str, Mask | None] = field(default_factory=dict)
    running: Mask = field(default_factory=ALL.copy)  # lanes that the present instruction is for

    def __post_init__(self) -> None:
        self.lane = np.arange(LANES, dtype=np.uint32)
        self.shared = Memory({0: np.zeros(_SHARED, np.uint8)})
        self.shared_is_known = Memory({0: np.zeros(_SHARED, np.uint8)})
        self.local = Memory({0: np.zeros(LANES * _LOCAL, np.uint8)})
        self._constants = {
            _BLOCK_AT: self.threads.to_bytes(4, "little") + b"\1\0\0\0" * 2,
            _GRID_AT: self.blocks.to_bytes(4, "little") + b"\1\0\0\0" * 2,
            _STACK_AT: (_LOCAL - 64).to_bytes(8, "little"),
            _WINDOW_AT: _WINDOW.to_bytes(8, "little"),
            _DESCRIPTOR_AT: bytes(8),
            ARGUMENTS_AT: self.arguments,
        }
        self.memory.add(_WINDOW, np.frombuffer(self.arguments, np.uint8))

    def local_address(self, addresses: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Where `local` holds what the running lanes have at their local addresses."""
        return addresses + self.lane[self.running].astype(np.uint64) * np.uint64(_LOCAL)

    def constant(self, bank: int, offsets: NDArray[np.int64], size: int) -> NDArray[np.uint64]:
        """Constants of up to 8 bytes, one for each offset; 0 in lanes that do not run."""
        found: dict[int, int] = {}
        stored_at = self._constants if bank == 0 else {0: self.banks.get(bank, b"")}
        for offset in np.unique(offsets[self.running] & 0xFFFF):
            for begin, stored in stored_at.items():
                if begin <= offset and offset + size <= begin + len(stored):
                    start = int(offset) - begin
                    found[int(offset)] = int.from_bytes(stored[start : start + size], "little")
            if int(offset) not in found:
                raise UnknownError
        return np.array([found.get(int(o) & 0xFFFF, 0) for o in offsets], np.uint64)

    def raw(self, name: str) -> Words:
        """A register's bits. One that was never written is zero: a program cannot depend on it."""
        if name.endswith("RZ"):
            return np.zeros(LANES, np.uint32)
        found = self.registers.get(name, _ZERO)
        if found is None:
            raise UnknownError
        return found

    def bits(self, operand: Operand, floating: str = "") -> Words:
        """32 bits without the operand's signs. `floating`: "f" or "d" for literals of floats."""
        if operand.kind is Kind.REGISTER:
            return self.raw(operand.name)
        if operand.kind is Kind.NUMBER:
            value = operand.value
            if operand.decimal and floating:
                convert = float_bits if floating == "f" else double_bits
                value = convert(operand.decimal)
            return np.full(LANES, value, np.uint32)
        if operand.kind is Kind.CONSTANT:
            return self.constant(operand.bank, self._offsets(operand), 4).astype(np.uint32)
        if operand.kind is Kind.NAME and operand.name == "SRZ":
            return np.zeros(LANES, np.uint32)
        raise UnknownError

    def _offsets(self, operand: Operand) -> NDArray[np.int64]:
        total = np.full(LANES, operand.value, np.int64)
        for name in operand.registers:
            total = total + self.raw(name).view(np.int32)
        return total

    def constant_of(self, operand: Operand, size: int) -> NDArray[np.uint64]:
        """A constant that an operand names, of up to 8 bytes."""
        return self.constant(operand.bank, self._offsets(operand), size)

    def u32(self, operand: Operand) -> Words:
        """An integer operand."""
        value = self.bits(operand)
        if operand.inverted:
            value = ~value
        return (np.uint32(0) - value) if operand.negated else value

    def s32(self, operand: Operand) -> NDArray[np.int64]:
        """A signed integer operand, in 64 bits."""
        return self.u32(operand).view(np.int32).astype(np.int64)

    def u64(self, operand: Operand) -> NDArray[np.uint64]:
        """A pair of registers, or a constant of 64 bits; a literal's sign is extended."""
        if operand.kind is Kind.REGISTER:
            low = self.raw(operand.name).astype(np.uint64)
            high = self.raw(next_register(operand.name)).astype(np.uint64)
            value = low | high << np.uint64(32)
        elif operand.kind is Kind.CONSTANT:
            value = self.constant_of(operand, 8)
        else:
            value = self.s32(operand).view(np.uint64)
        if operand.inverted:
            value = ~value
        return (np.uint64(0) - value) if operand.negated else value

    def f32(self, operand: Operand) -> NDArray[np.float32]:
        """A float operand."""
        value = self.bits(operand, "f")
        if operand.absolute:
            value = value & np.uint32(0x7FFFFFFF)
        return (value ^ np.uint32(0x80000000 if operand.negated else 0)).view(np.float32)

    def f64(self, operand: Operand) -> NDArray[np.float64]:
        """A float64 operand."""
        if operand.kind is Kind.NUMBER:
            value = self.bits(operand, "d").astype(np.uint64) << np.uint64(32)
        else:
            plain = Operand(operand.kind, operand.name, operand.value, operand.bank)
            value = self.u64(plain)
        if operand.absolute:
            value = value & np.uint64((1 << 63) - 1)
        return (value ^ np.uint64((1 << 63) if operand.negated else 0)).view(np.float64)

    def predicate(self, operand: Operand | str) -> Mask:
        """A predicate, from an operand or as an instruction's guard names it."""
        name = operand if isinstance(operand, str) else operand.name
        inverted = name.startswith("!") if isinstance(operand, str) else operand.inverted
        name = name.lstrip("!")
        found = ALL if name.endswith("PT") else self.predicates.get(name, ~ALL)
        if found is None:
            raise UnknownError
        return ~found if inverted else found

    def address(self, operand: Operand) -> NDArray[np.uint64]:
        """The addresses of the running lanes."""
        first, *others = operand.registers or ("RZ",)
        total = self.u64(Operand(Kind.REGISTER, first)) if operand.wide else self.raw(first)
        total = total.astype(np.uint64) + np.uint64(operand.value & 0xFFFFFFFFFFFFFFFF)
        for name in others:
            pair = Operand(Kind.REGISTER, name)
            total = total + (self.u64(pair) if operand.wide else self.raw(name))
        return total[self.running]

    def set(self, operand: Operand | str, value: NDArray[np.generic]) -> None:
        """Writes 32 bits to a register, in the running lanes."""
        name = operand if isinstance(operand, str) else operand.name
        if name.endswith("RZ"):
            return
        bits = value.astype(np.uint32) if value.dtype.kind != "f" else value.view(np.uint32)
        old = self.registers.get(name, _ZERO)
        if self.running.all():
            self.registers[name] = bits
        elif old is not None:
            self.registers[name] = np.where(self.running, bits, old)

    def set64(self, operand: Operand, value: NDArray[np.generic]) -> None:
        """Writes a pair of registers."""
        bits = value.view(np.uint64) if value.dtype.itemsize == 8 else value.astype(np.uint64)
        self.set(operand, bits & np.uint64(0xFFFFFFFF))
        self.set(next_register(operand.name), bits >> np.uint64(32))

    def set_predicate(self, operand: Operand, value: Mask) -> None:
        """Writes a predicate, in the running lanes."""
        if operand.name.endswith("PT"):
            return
        old = self.predicates.get(operand.name, ~ALL)
        if self.running.all():
            self.predicates[operand.name] = value.astype(bool)
        elif old is not None:
            self.predicates[operand.name] = np.where(self.running, value, old)


_ZERO = np.zeros(LANES, np.uint32)


def next_register(name: str, by: int = 1) -> str:
    """The register behind another."""
    kind = name.rstrip("0123456789Z")
    return name if name.endswith("Z") else f"{kind}{int(name[len(kind) :]) + by}"
