"""Builds .cu files with g++ and the CUDA-on-CPU shim, and runs what comes out."""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from made import ROOT, compiled, librarys, linked

sys.path.append(str(ROOT))

from build_tools.generated import families_of

HERE = Path(__file__).resolve().parent
# A source, and the family of rules that it is compiled for, or "".
Part = tuple[Path, str]

# No contraction and no errno: the arithmetic that the library itself is built with.
# psabi: the CPU loops' wide vectors never leave inlined functions.
FLAGS = [
    *("-std=c++20", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-omit-frame-pointer"),
]
# The pretend GPU is linked of plain objects too. -O2 takes twice as long to compile and saves less
# than that when they run. -g1 has the lines that a sanitizer names; -g would double the time again.
# UBSan's checks for null pointers are left out: they double the time to compile once more, and a
# null pointer that is used stops the program anyhow.
VARIANTS = {
    "plain": ["-O1", "-fPIC", "-fvisibility=hidden"],
    "asan": [
        *("-Og", "-g1", "-fsanitize=address,undefined", "-fsanitize=float-cast-overflow"),
        *("-fno-sanitize=null,object-size", "-fno-sanitize-recover=all"),
    ],
    "tsan": ["-Og", "-g1", "-fsanitize=thread"],
}

# Sources without CUDA that the library is built of too, and how the names of its objects begin.
LIBRARYS = {
    ROOT / "csrc/core/rules.cpp": "core_rules",
    ROOT / "csrc/cpu/apply.cpp": "cpu_apply_baseline",
    ROOT / "csrc/cpu/convert.cpp": "cpu_convert_baseline",
    ROOT / "csrc/cpu/loops.cpp": "cpu_loops_baseline",
    ROOT / "csrc/cpu/multiply.cpp": "cpu_multiply_baseline",
    ROOT / "csrc/cpu/passes.cpp": "cpu_passes",
}


def build(
    sources: Sequence[Path],
    out: Path,
    variant: str,
    include: Sequence[Path],
    defines: Sequence[str] = (),
) -> Path:
    """Compile and link `sources` (.cu and .cpp) into a program in the folder `out`.

    Raises RuntimeError with the compiler's output.
    """
    objects = objects_of(sources, variant, include, defines)
    if variant == "asan":
        for (source, _), target in objects.items():
            if source.suffix == ".cu":
                _refuse_unguarded_shared_memory(target, source)
    return link(list(objects.values()), out / f"{sources[0].stem}-{variant}", variant)


def objects_of(
    sources: Sequence[Path], variant: str, include: Sequence[Path], defines: Sequence[str] = ()
) -> dict[Part, Path]:
    """The objects of each source, the library's own where they serve; compiles two at a time."""

    def made(part: Part) -> Path:
        source, family = part
        own = None
        if variant == "plain" and source in LIBRARYS:
            own = librarys("_".join(filter(None, (LIBRARYS[source], family))))
        return own or compiled(source, arguments(part, variant, include, defines))

    parts = [part for source in sources for part in parts_of(source)]
    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(parts, pool.map(made, parts), strict=True))


def parts_of(source: Path) -> list[Part]:
    """What a source is compiled as: once, or once for each family of rules."""
    return [(source, family) for family in families_of(source)]


def shim_objects() -> list[Path]:
    """The objects of the shim, which is never built with a sanitizer."""
    command = ["g++", *FLAGS, "-O2", "-fPIC", "-fvisibility=hidden"]
    return [compiled(source, command) for source in sorted(HERE.glob("*.cpp"))]


def arguments(
    part: Part, variant: str, include: Sequence[Path], defines: Sequence[str] = ()
) -> list[str]:
    """The command that compiles a part."""
    source, family = part
    # TSan has to see the kernels alone: everything else runs in one thread.
    of = "plain" if variant == "tsan" and source.suffix != ".cu" else variant
    options = [*(f"-I{folder}" for folder in [*include, HERE]), *(f"-D{d}" for d in defines)]
    if source.parent.name == "cpu":
        options.append("-DAMP_MP_ISA=baseline")
    if family:
        options.append(f"-DAMP_MP_FAMILY={family}")
    language = ["-x", "c++"] if source.suffix == ".cu" else []
    return ["g++", *FLAGS, *VARIANTS[of], *options, *language]


def link(objects: Sequence[Path], program: Path, variant: str) -> Path:
    """Link objects, of which some may be of a variant without sanitizer, with the shim."""
    inputs = map(str, [*shim_objects(), *objects])
    return linked(["g++", *VARIANTS[variant], *inputs, "-fopenmp", "-pthread"], program)


def run(
    exe: Path, variant: str, *args: str, order: str = "forward", timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a program of `build`; blocks and threads take turns in `order`."""
    environment = {
        **os.environ,
        "AMP_MP_CPU": "baseline",  # no other loops are linked
        "CUDA_ON_CPU_ORDER": order,
        # Else every process sleeps for a second at its end, and prints hundreds of races first.
        "TSAN_OPTIONS": "atexit_sleep_ms=0 halt_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    prefix = _without_random_addresses() if variant == "tsan" else []
    return subprocess.run(
        [*prefix, str(exe), *args],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@functools.cache
def why_unavailable(variant: str) -> str | None:
    """The reason why `variant` cannot be built here, or None if it can."""
    command = ["g++", *VARIANTS[variant], "-x", "c++", "-", "-o", os.devnull]
    try:
        result = subprocess.run(
            command, input="int main() {}", capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return "no g++"
    if result.returncode == 0:
        return None
    lines = result.stderr.strip().splitlines()
    missing = [line for line in lines if "cannot find" in line]
    return f"g++ cannot build the {variant} variant: {(missing or lines or ['?'])[0]}"


def _refuse_unguarded_shared_memory(target: Path, source: Path) -> None:
    """Raise if `target` has statics that AddressSanitizer puts no red zones around.

    Those are the statics of inline functions and templates that several objects may share; they
    lie in sections of their own. An overflow would go unnoticed, or be blamed on another array.
    """
    result = subprocess.run(
        ["readelf", "-SW", str(target)], capture_output=True, text=True, check=True
    )
    names = sorted(set(re.findall(r" \.bss\.(_ZZ\S+)", result.stdout)))
    if names:
        raise RuntimeError(
            f"{source}: AddressSanitizer cannot guard the shared memory {', '.join(names)}: "
            "put the functions that declare it into an anonymous namespace"
        )


@functools.cache
def _without_random_addresses() -> list[str]:
    """The prefix TSan needs where the kernel spreads addresses wider than it can shadow."""
    try:
        bits = int(Path("/proc/sys/vm/mmap_rnd_bits").read_text())
    except (OSError, ValueError):  # unreadable: better safe
        bits = 32
    return ["setarch", platform.machine(), "-R"] if bits > 28 else []
