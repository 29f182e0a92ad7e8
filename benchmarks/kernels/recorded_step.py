"""What apply_kernel is launched with: arguments and memory, recorded from the library's host code.

recorder/record_step.cpp runs the host code on the emulator of tests/emulators/cuda_on_cpu.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sass_warp import Memory

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
sys.path.append(str(ROOT / "tests/emulators"))

from cuda_on_cpu.build import build, why_unavailable  # noqa: E402

__all__ = ["RecordedStep", "build_recorder", "record", "why_unavailable"]
PAGE = 4096
HEAD = "<8Q"


@dataclass
class RecordedStep:
    """A launch of apply_kernel. Each `memory` is a copy."""

    blocks: int
    threads: int
    master_at: int  # address of the first array of the master
    master_width: int  # bytes of one of its elements
    master_bytes: int
    arguments: bytes
    before: bytes
    after: bytes

    def memory(self) -> Memory:
        """What was there when the kernel began."""
        return Memory(_ranges(self.before))

    def memory_after(self) -> Memory:
        """What the kernel leaves, by the emulator."""
        return Memory(_ranges(self.after))


def build_recorder(folder: Path, rules: Sequence[str]) -> Path:
    """Compiles the recorder for `rules`; takes some seconds."""
    here = Path(__file__).resolve().parent / "recorder"
    listed = " ".join(f"X({rule}, {rule})" for rule in rules)
    defines = [f"AMP_MP_RECORDED_RULES(X)={listed}"]
    cuda = (CSRC / "cuda" / name for name in ("step_table.cu", "runtime.cu"))
    sources = [here / "record_step.cpp", *cuda]
    return build(sources, folder, "plain", [here, CSRC], defines)


def record(
    recorder: Path, rule: str, formats: Sequence[str], skew: int, numbers: str = "usual"
) -> RecordedStep:
    """Records a step. `formats`: of gradient, master, copy ("-" for none), moment and square.

    `skew`: elements that every array is off an aligned address. `numbers`: "usual", or "rare" for
    zeros, subnormal and large ones too.
    """
    file = recorder.parent / "step.bin"
    done = subprocess.run(
        [str(recorder), str(file), rule, numbers, str(skew), *formats],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{recorder.name} {rule} {' '.join(formats)}: {done.stderr}")
    stored = file.read_bytes()
    file.unlink()
    *numbers, arguments, before, after = struct.unpack_from(HEAD, stored)
    parts, place = [], struct.calcsize(HEAD)
    for size in (arguments, before, after):
        parts.append(stored[place : place + size])
        place += size
    return RecordedStep(*numbers, *parts)


def _ranges(stored: bytes) -> dict[int, NDArray[np.uint8]]:
    """Memory by address, from record_step.cpp's memory_of_process."""
    (count,) = struct.unpack_from("<Q", stored)
    bounds = np.frombuffer(stored, np.uint64, 2 * count, 8).reshape(count, 2)
    ranges = {int(begin): np.zeros(int(end - begin), np.uint8) for begin, end in bounds}
    starts = np.array(sorted(ranges), np.uint64)
    pages = np.frombuffer(stored, np.uint8, offset=8 + 16 * count).reshape(-1, 8 + PAGE)
    for page in pages:
        address = page[:8].copy().view(np.uint64)[0]
        begin = int(starts[np.searchsorted(starts, address, "right") - 1])
        place = int(address) - begin
        ranges[begin][place : place + PAGE] = page[8:]
    return ranges
