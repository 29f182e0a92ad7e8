"""Runs one warp through machine code, all 32 lanes in step, and keeps what it has executed.

Lanes that a branch separates run one after another and meet again where the code says so. Nothing
is assumed of values: what an instruction that is not known here writes is unknown, and a branch on
it is guessed and named in Trace.guesses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import sass_floats  # noqa: F401, registers what its instructions do
from numpy.typing import NDArray
from sass import Function, Instruction
from sass_barriers import Barriers, Group
from sass_integers import EFFECTS
from sass_lanes import LOADS, STORES, load, store
from sass_operands import Kind, Operand
from sass_warp import ALL, Mask, UnknownError, Warp, next_register

# Without an effect on what is followed here.
IGNORED = {"NOP", "YIELD", "NANOSLEEP", "BAR", "MEMBAR", "ERRBAR", "CCTL", "DEPBAR", "WARPSYNC"}
LIMIT = 200_000  # instructions


@dataclass
class Executed:
    """One instruction that the warp has issued."""

    index: int  # in the function
    ran: bool  # whether its guard was true in any lane
    cached: bool = False  # a load of bytes that this warp has read before
    addresses: NDArray[np.uint64] | None = None  # of an access to global memory, one a lane


@dataclass
class Trace:
    """All that a warp has issued, in order."""

    steps: list[Executed] = field(default_factory=list)
    guesses: list[str] = field(default_factory=list)  # what was not known, a sentence each

    def guess(self, sentence: str) -> None:
        """Notes a guess, once."""
        if sentence not in self.guesses:
            self.guesses.append(sentence)


class Runner:
    """Runs a warp from a function's first instruction to its end."""

    def __init__(self, function: Function, warp: Warp) -> None:
        self.function, self.warp, self.trace = function, warp, Trace()
        self._ready = [Group(0, ALL.copy())]
        self._barriers = Barriers()
        self._live = ALL.copy()
        self._read: set[int] = set()  # addresses of global memory

    def run(self) -> Trace:
        """Everything the warp issues. Raises RuntimeError if it does not end."""
        with np.errstate(all="ignore"):  # infinities and NaN are numbers like others here
            self._run()
        if held := self._barriers.held():
            raise RuntimeError(f"lanes wait for ever at {', '.join(held)}")
        return self.trace

    def _run(self) -> None:
        while self._ready:
            group = min(self._ready, key=lambda one: one.at)
            for other in [one for one in self._ready if one is not group and one.at == group.at]:
                group.lanes = group.lanes | other.lanes
                self._ready.remove(other)
            if not self._step(group):
                self._ready.remove(group)
                self._ready += self._barriers.released(self._live)
            if len(self.trace.steps) > LIMIT:
                raise RuntimeError(f"no end after {LIMIT} instructions")

    def _step(self, group: Group) -> bool:
        """Executes the group's instruction; whether the group can go on."""
        i = self.function.instructions[group.at]
        warp = self.warp
        try:
            warp.running = group.lanes & warp.predicate(i.guard) if i.guard else group.lanes
        except UnknownError:
            if i.name in ("BRA", "EXIT", "BSYNC", "CALL", "RET", "BRX"):
                self.trace.guess(f"{i}: its guard is not known, taken as false")
                warp.running = ~ALL
            else:
                warp.running = group.lanes
                self._forget(i)
                self.trace.steps.append(Executed(group.at, True))
                group.at += 1
                return True
        done = Executed(group.at, bool(warp.running.any()))
        self.trace.steps.append(done)
        group.at += 1
        if i.name in ("BRA", "CALL", "RET", "BRX", "EXIT", "BSSY", "BSYNC", "BREAK", "WARPSYNC"):
            return self._control(i, group)
        if done.ran:
            self._execute(i, done)
        return True

    def _execute(self, i: Instruction, done: Executed) -> None:
        operands = i.operands
        try:
            if i.name in LOADS:
                addresses = load(self.warp, i, operands)
                if LOADS[i.name] == "global":
                    asked = {int(a) for a in addresses}
                    done.cached, done.addresses = asked <= self._read, addresses
                    self._read |= asked
            elif i.name in STORES:
                addresses = store(self.warp, i, operands)
                done.addresses = addresses if STORES[i.name] == "global" else None
            elif i.name not in IGNORED:
                function, allowed = EFFECTS[i.name]
                if allowed is not None and i.modifiers - allowed:
                    raise UnknownError
                function(self.warp, i, operands)
        except (UnknownError, KeyError):
            self._forget(i)
        except IndexError as error:
            raise RuntimeError(f"{i}: {error}") from None

    def _forget(self, i: Instruction) -> None:
        """What an instruction writes is not known any more."""
        if i.name in STORES:
            self.trace.guess(f"{i}: what it stores, or where, is not known")
            return
        if i.name in LOADS and i.operands[-1].kind is Kind.ADDRESS:
            self.trace.guess(f"{i}: what it loads is not known")
        for operand in _written(i):
            if operand.kind is Kind.PREDICATE:
                self.warp.predicates[operand.name] = None
                continue
            is_pair = i.modifiers & {"64", "WIDE", "F64", "S64", "U64"} or i.name.startswith("D")
            words = 4 if "128" in i.modifiers else 2 if is_pair else 1
            for n in range(words):
                self.warp.registers[next_register(operand.name, n)] = None

    def _control(self, i: Instruction, group: Group) -> bool:
        """Jumps, barriers and ends; whether the group can go on."""
        running, operands = self.warp.running.copy(), i.operands
        stay = group.lanes & ~running
        if i.name == "BSSY":
            self._barriers.expect(operands[0].name, group.lanes)
            return True
        if i.name == "BREAK":
            self._barriers.leave(operands[-1].name, running)
            self._ready += self._barriers.released(self._live)
            return True
        if i.name in ("BSYNC", "WARPSYNC"):
            name = operands[0].name if i.name == "BSYNC" else f"WARPSYNC at {i.address:#x}"
            if i.name == "WARPSYNC":
                self._barriers.expect(name, ALL)
            self._barriers.wait(name, Group(group.at, running))
            group.lanes = stay
            return bool(stay.any())
        if i.name == "EXIT":
            self._live &= ~running
            group.lanes = stay
            return bool(stay.any())
        if i.name == "CALL":
            self.trace.guess(f"{i}: a subroutine is called, mostly a slow way for rare numbers")
        for place, lanes in self._targets(i, running):
            if (lanes == group.lanes).all():
                group.at = place
                return True
            self._ready.append(Group(place, lanes))
            group.lanes = group.lanes & ~lanes
        return bool(group.lanes.any())

    def _targets(self, i: Instruction, running: Mask) -> Iterator[tuple[int, Mask]]:
        """Where each of the running lanes goes, if it jumps."""
        conditions = [one for one in i.operands if one.kind is Kind.PREDICATE]
        try:
            for one in conditions:
                running = running & self.warp.predicate(one)
        except UnknownError:
            self.trace.guess(f"{i}: its condition is not known, taken as false")
            return
        if "DIV" in i.modifiers and running.sum() == self._live.sum():
            return  # no lane is apart
        if not running.any():
            return
        label = next((one.name for one in i.operands if one.kind is Kind.LABEL), None)
        if label is not None:
            yield self.function.labels[label], running
            return
        yield from self._computed_targets(i, running)

    def _computed_targets(self, i: Instruction, running: Mask) -> Iterator[tuple[int, Mask]]:
        """Where lanes go by a register: back from a subroutine, or to a case of a switch."""
        found = re.match(r"(R\d+)(?: (-?0x[0-9a-f]+))?", i.text)
        try:
            if found is None or i.name not in ("RET", "BRX"):
                raise UnknownError
            addresses = self.warp.u64(Operand(Kind.REGISTER, found[1]))
            if i.name == "BRX":  # relative to the next instruction
                addresses = addresses + np.uint64(i.address + 16 + int(found[2], 16))
            addresses = addresses & np.uint64(0xFFFFFFFF)
            for address in np.unique(addresses[running]):
                yield self.function.index_at[int(address)], running & (addresses == address)
        except (UnknownError, KeyError):
            raise RuntimeError(f"{i}: it is not known where this goes") from None


def _written(i: Instruction) -> list[Operand]:
    """The operands that come first and are written: predicates and one register."""
    written, has_register = [], False
    for operand in i.operands:
        if operand.kind is Kind.REGISTER and not has_register:
            has_register = True
        elif operand.kind is not Kind.PREDICATE:
            break
        written.append(operand)
    return written


def run(function: Function, warp: Warp) -> Trace:
    """Runs `warp` through `function`."""
    warp.banks = function.constants
    return Runner(function, warp).run()
