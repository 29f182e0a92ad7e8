"""The compiler vectorises every update loop: a scalar one is up to nine times slower.

A branch in a rule or in a conversion is enough for it. AVX2 is the strictest: AVX-512 has masks.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
sys.path.append(str(ROOT))

from build_tools import native, test_aarch64  # noqa: E402

GCC = shutil.which("g++")
# By file: the first lines of the loops over elements that every step runs, and of float8.
LOOPS = {
    "cpu/apply.h": ["for (int i = 0; i < n; ++i) {\n    const uint32_t bits"],
    "cpu/pairs.h": ["for (int i = 0; i < pairs; ++i) {"],
    "cpu/halves.h": [
        "for (int i = 0; i < n / 2; ++i) {\n    const uint32_t two = codes[i]",
        "for (int i = 0; i < n / 2; ++i) {\n    const uint32_t two = bytes[i]",
    ],
    "cpu/first_passes.h": [
        "for (int k = 0; k < n; ++k) rule.moments",
        "for (int j = 0; j < kLanes; ++j) {\n      const bool counts",
        "for (int k = 0; k < n; ++k) update[k] = ",
    ],
    "cpu/float8.h": [
        "for (int i = 0; i < part.columns; ++i) {",
        "for (int i = 0; i < n; ++i) wide[i] = float8_code",
    ],
    "cpu/tiles.h": [
        "for (int i = 0; i < n; ++i) to[i] = join_float16<Split>",
        "for (int i = 0; i < n; ++i) remainder[i] = remainder_of_float16<Split>",
        "for (int i = 0; i < n; ++i) to[i] = Group::decode(",
        "for (int i = 0; i < n; ++i)\n    code[i].code = ",
    ],
}


def line_of(file: str, start: str) -> int:
    """The line of the one loop that begins so."""
    text = (CSRC / file).read_text()
    assert text.count(start) == 1, f"{file}: adapt LOOPS to the loop that was {start!r}"
    return text[: text.index(start)].count("\n") + 1


@pytest.mark.slow
@pytest.mark.full
def test_update_loops_are_vectors(tmp_path: Path) -> None:
    version = subprocess.run([GCC or "false", "--version"], capture_output=True, text=True).stdout
    if "Free Software Foundation" not in version or platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("only GCC reports what it vectorises in this way, and AVX2 is x86's")
    source = (ROOT / "build_tools/native.py").read_text()
    found = re.search(r'CXX_FLAGS = "(.*)"', source)
    assert found is not None
    command = [str(GCC), *found[1].split(), "-w", f"-I{CSRC}", "-DAMP_MP_ISA=avx2"]
    command += ["-march=x86-64-v3"]
    lines = []
    alone = [native.Unit(CSRC / f"cpu/{name}.cpp", command) for name in ("convert", "loops")]
    for unit in [*alone, *native.of_families(CSRC / "cpu/apply.cpp", command)]:
        report = tmp_path / unit.name
        options = [f"-fopt-info-vec-optimized-missed={report}", "-c", str(unit.source)]
        options += ["-o", os.devnull]
        ran = subprocess.run([*unit.command, *options], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        lines += report.read_text().splitlines()
    scalar, missing = [], []
    for file, starts in LOOPS.items():
        for start in starts:
            place = f"{file}:{line_of(file, start)}:"
            said = [line.split(place)[1] for line in lines if place in line]
            if any("couldn't vectorize loop" in line for line in said):
                scalar.append(place)
            if not any("loop vectorized" in line for line in said):
                missing.append(place)
    assert (scalar, missing) == ([], [])


def test_what_emulation_needs_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit, match=r"apt install qemu-user-static g\+\+-aarch64-linux-gnu"):
        test_aarch64.qemu()
