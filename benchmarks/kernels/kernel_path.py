"""The main path of apply_kernel: what one iteration of its loop costs, by preset and rule.

One warp runs through the machine code of the kernel (sass_run.py) with the arguments of a real step
(recorded_step.py), on numbers of ordinary size; the last full iteration counts. Every byte that it
stores is compared with what the emulator has stored, so that the path cannot be a wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as File

import numpy as np
from kernel_code import Kernel
from recorded_step import RecordedStep, record
from sass import Function
from sass_lanes import STORES, size_of
from sass_run import Executed, Trace, run
from sass_time import Stretch, cycles, rounds, stalls
from sass_warp import LANES, Warp

ARCH = "90"  # the architecture whose machine code is followed
PACK = 8  # elements that all figures are for, a thread
# Formats of gradient, master, copy, moment and square, by core/format_list.h's names.
PRESETS: Mapping[str, tuple[str, ...]] = {
    "float32": ("float32", "float32", "-", "float32", "float32"),
    "float32, copy": ("bfloat16", "float32", "bfloat16", "float32", "float32"),
    "exact": ("bfloat16", "bfloat16_split32", "-", "float32", "float32"),
    "lean": ("bfloat16", "bfloat16_split24", "-", "bfloat16_stochastic", "ue8m8"),
    "tiny": ("bfloat16", "bfloat16_split24", "-", "m8", "ue8m8"),
    "micro": ("bfloat16", "bfloat16_split24", "-", "m8", "log8"),
}
RULES = ("AdamW", "Adam", "SGD", "Lion", "RMSprop", "PlainRMSprop")

# An H100: multiprocessors, clock, bytes a second of a copy, instructions a cycle and
# multiprocessor, of which a kernel reaches a part, and cycles of a load while the memory is busy.
MULTIPROCESSORS, CLOCK, BANDWIDTH = 132, 1.7e9, 3.0e12
ISSUED, REACHED, LOADED_LATENCY = 4, 0.8, 1200


@dataclass
class Path:
    """One iteration, for PACK elements a thread."""

    instructions: float
    stalls: float
    rounds: float  # dependent waits for the memory
    alone: float  # cycles of a warp alone, loads at LOADED_LATENCY
    bytes: float  # that an element reads and writes
    wrong: int  # stored bytes that are not the emulator's
    guesses: list[str]  # what was not known on the way

    def times(self, warps: int) -> tuple[float, float, float]:
        """Seconds an element on an H100 with `warps` warps a multiprocessor, each a lower bound.

        By the bytes, by the instructions that are issued, and by the waits of each warp.
        """
        cycle = 1 / (MULTIPROCESSORS * CLOCK) / (PACK * LANES)  # of all, for an element
        issue = self.instructions / (ISSUED * REACHED)
        return self.bytes / BANDWIDTH, issue * cycle, self.alone / warps * cycle

    def share(self, warps: int) -> float:
        """Estimated share of BANDWIDTH: the time of the bytes, of the longest time."""
        times = self.times(warps)
        return times[0] / max(times)


@dataclass
class Measured:
    """The path of one kernel with one preset; `skew`: elements that arrays are off alignment."""

    kernel: Kernel
    rule: str
    preset: str
    skew: int
    path: Path


def code_of(kernels: Sequence[Kernel], rule: str) -> tuple[Kernel, Function]:
    """The apply kernel of a rule. Raises ValueError where there is not one with machine code."""
    name = re.sub(r"^Amsgrad(\w+)$", r"Amsgrad<\1>", rule)  # an alias in C++
    found = [k for k in kernels if k.name == f"apply_kernel<{name}>"]
    codes = [k.code for k in found if k.code is not None]
    if len(codes) != 1:
        raise ValueError(f"{len(codes)} kernels with machine code are called apply_kernel<{rule}>")
    return found[0], codes[0]


def measure(
    kernels: Sequence[Kernel], recorder: File, rule: str, preset: str, skew: int
) -> Measured:
    """Follows apply_kernel of a rule, on usual numbers."""
    kernel, code = code_of(kernels, rule)
    step = record(recorder, rule, PRESETS[preset], skew)
    return Measured(kernel, rule, preset, skew, follow(code, step))


def follow(function: Function, step: RecordedStep) -> Path:
    """Runs the first warp of a recorded launch. Raises ValueError where no loop is found."""
    memory = step.memory()
    warp = Warp(step.arguments, memory, step.threads, step.blocks)
    trace = run(function, warp)
    steps = last_iteration(function, trace)
    stretch = [(function.instructions[one.index], one) for one in steps]
    packs = _elements(step, stretch) / PACK
    if packs == 0:
        raise ValueError(f"{function.name}: the loop stores no master")
    return Path(
        instructions=len(stretch) / packs,
        stalls=stalls(stretch) / packs,
        rounds=rounds(stretch) / packs,
        alone=cycles(stretch, LOADED_LATENCY) / packs,
        bytes=_moved(stretch) / (packs * PACK * LANES),
        wrong=_wrong_bytes(function, trace, warp, step),
        guesses=trace.guesses,
    )


def last_iteration(function: Function, trace: Trace) -> list[Executed]:
    """What was executed between the last two times that the longest loop was begun again."""
    begun: dict[int, list[int]] = {}
    for n, (one, after) in enumerate(zip(trace.steps, trace.steps[1:], strict=False)):
        is_jump = function.instructions[one.index].name == "BRA"
        if is_jump and one.ran and after.index <= one.index:
            begun.setdefault(one.index, []).append(n)
    gaps = {index: at[-1] - at[-2] for index, at in begun.items() if len(at) > 1}
    if not gaps:
        raise ValueError(f"{function.name}: no loop was run three times")
    last = begun[max(gaps, key=lambda index: gaps[index])]
    return trace.steps[last[-2] + 1 : last[-1] + 1]


def _elements(step: RecordedStep, stretch: Stretch) -> float:
    """Elements of the master that a thread has stored."""
    begin, total = np.uint64(step.master_at), 0
    for i, one in stretch:
        if i.name in STORES and one.addresses is not None:
            inside = (one.addresses >= begin) & (one.addresses - begin < step.master_bytes)
            total += int(inside.sum()) * size_of(i)
    return total / step.master_width / LANES


def _moved(stretch: Stretch) -> int:
    """Bytes of global memory that are read, for the first time, and written."""
    read, written = set[int](), set[int]()
    for i, one in stretch:
        if one.addresses is not None and not one.cached:
            every = one.addresses[:, None] + np.arange(size_of(i), dtype=np.uint64)
            (written if i.name in STORES else read).update(every.ravel().tolist())
    return len(read) + len(written)


def _wrong_bytes(function: Function, trace: Trace, warp: Warp, step: RecordedStep) -> int:
    """Bytes that the warp has stored and that are not what the emulator has stored."""
    after, wrong = step.memory_after(), 0
    for one in trace.steps:
        i = function.instructions[one.index]
        if i.name in STORES and one.addresses is not None and len(one.addresses):
            size = size_of(i)
            found, wanted = (m.read(one.addresses, size) for m in (warp.memory, after))
            wrong += int((found != wanted).sum())
    return wrong
