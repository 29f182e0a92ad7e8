"""How long a warp alone takes for a stretch of machine code, by the compiler's own barriers.

A simple model: instructions issue one after another, each waits for the barriers that its control
word names, and a barrier falls after the latency of the instruction that raised it. Pipes, bank
conflicts and other warps are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from sass import NO_BARRIER, Instruction
from sass_run import Executed

CACHED = 40  # cycles until a load from the L1 cache, or of a constant in global memory, is there
READ = 20  # until an access to memory has read its registers
# Cycles until other results of variable latency are there; 18 for those not named.
LATENCY = {
    **dict.fromkeys(("MUFU", "I2F", "F2I", "F2F", "FCHK", "POPC", "FLO", "BREV"), 22),
    **{"SHFL": 24, "LDC": 30, "ULDC": 30, "LDS": 30, "S2R": 25, "S2UR": 25, "R2UR": 12},
    **{"LDL": CACHED, "STG": READ, "STS": READ, "STL": READ},
}
DEFAULT_LATENCY = 18
JUMP = 5  # cycles of a jump, at the least
PASSES = 3  # of the stretch, of which the last counts

Stretch = Sequence[tuple[Instruction, Executed]]


def cycles(stretch: Stretch, memory: float) -> float:
    """Cycles of one pass of a loop's body that a warp alone repeats; loads take `memory` cycles."""
    now, falls = 0.0, [0.0] * 6
    ends = [0.0]
    for _ in range(PASSES):
        for i, step in stretch:
            control = i.control
            for barrier in range(6):
                if control.waits >> barrier & 1:
                    now = max(now, falls[barrier])
            latency = _latency(i, step, memory) if step.ran else 2.0
            if control.written != NO_BARRIER:
                falls[control.written] = max(falls[control.written], now + latency)
            if control.read != NO_BARRIER:
                falls[control.read] = max(falls[control.read], now + min(latency, READ))
            now += max(control.stall, JUMP if i.name in ("BRA", "BSYNC") else 1)
        ends.append(now)
    return ends[-1] - ends[-2]


def _latency(i: Instruction, step: Executed, memory: float) -> float:
    if i.name in ("LDG", "LD"):
        return CACHED if step.cached else memory
    return LATENCY.get(i.name, DEFAULT_LATENCY)


def rounds(stretch: Stretch) -> float:
    """How often the warp waits for the memory, one wait after another, in one pass."""
    return round((cycles(stretch, 20_000) - cycles(stretch, 10_000)) / 10_000, 2)


def stalls(stretch: Stretch) -> int:
    """The sum of the stall counts."""
    return sum(i.control.stall for i, _ in stretch)
