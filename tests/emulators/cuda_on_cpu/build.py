"""Builds .cu files with g++ and the CUDA-on-CPU shim, and runs what comes out."""

import functools
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent

# No contraction and no errno: the arithmetic that the library itself is built with. -g1 has the
# lines that a sanitizer names; with -g the kernels take twice the time to compile.
# psabi: the CPU loops' wide vectors never leave inlined functions.
FLAGS = [
    *("-std=c++20", "-g1", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-omit-frame-pointer"),
]
# UBSan's checks for null pointers are left out: they double the time to compile once more, and a
# null pointer that is used stops the program anyhow.
VARIANTS = {
    "plain": ["-Og"],  # -O2 takes twice as long to compile and saves less than that when it runs
    "asan": [
        *("-Og", "-fsanitize=address,undefined", "-fsanitize=float-cast-overflow"),
        *("-fno-sanitize=null,object-size", "-fno-sanitize-recover=all"),
    ],
    "tsan": ["-Og", "-fsanitize=thread"],
}


def build(
    sources: Sequence[Path],
    out: Path,
    variant: str,
    include: Sequence[Path],
    defines: Sequence[str] = (),
) -> Path:
    """Compile and link `sources` (.cu and .cpp) into a program in the folder `out`.

    Raises RuntimeError with the compiler's output. Variants that are built into the same folder
    share the shim's objects, and what TSan need not see of the plain variant's.
    """
    program = out / f"{sources[0].stem}-{variant}"
    folders = [*include, HERE]

    jobs = _shim_jobs(out)
    objects = [target for _, target in jobs]
    jobs = [
        job for job in jobs if not _is_current(job[1], [*HERE.glob("*.cpp"), *HERE.glob("*.h")])
    ]
    kernels = {}
    for source, target in objects_of(sources, out, variant).items():
        of = _variant_of(source, variant)
        target.parent.mkdir(parents=True, exist_ok=True)
        objects.append(target)
        headers = [h for folder in [source.parent, *folders] for h in folder.rglob("*.h")]
        if of != variant and _is_current(target, [source, *headers]):
            continue
        jobs.append((arguments(source, target, of, include, defines), target))
        if source.suffix == ".cu":
            kernels[source] = target
    with ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(lambda job: gcc(job[0]), jobs))
    if variant == "asan":
        for source, target in kernels.items():
            _refuse_unguarded_shared_memory(target, source)
    link(objects, program, variant)
    return program


def objects_of(sources: Sequence[Path], out: Path, variant: str) -> dict[Path, Path]:
    """Where `build` puts the object of each source."""
    # The number tells cpu/apply.cpp from cuda/apply.cu.
    return {
        s: out / f"{sources[0].stem}-{_variant_of(s, variant)}.objects" / f"{number}-{s.name}.o"
        for number, s in enumerate(sources)
    }


def shim_objects(out: Path) -> list[Path]:
    """Where `build` puts the objects of the shim."""
    return [target for _, target in _shim_jobs(out)]


def arguments(
    source: Path, target: Path, variant: str, include: Sequence[Path], defines: Sequence[str] = ()
) -> list[str]:
    """What g++ is given to compile `source` into the object `target`."""
    options = [*(f"-I{folder}" for folder in [*include, HERE]), *(f"-D{d}" for d in defines)]
    language = ["-x", "c++"] if source.suffix == ".cu" else []
    return [*FLAGS, *VARIANTS[variant], *options, *language, "-c", str(source), "-o", str(target)]


def link(objects: Sequence[Path], program: Path, variant: str) -> None:
    """Link objects, of which some may be of a variant without sanitizer."""
    gcc([*VARIANTS[variant], *map(str, objects), "-o", str(program), "-pthread"])


def _variant_of(source: Path, variant: str) -> str:
    # TSan has to see the kernels alone: everything else runs in one thread.
    return "plain" if variant == "tsan" and source.suffix != ".cu" else variant


def run(
    exe: Path, variant: str, *args: str, order: str = "forward", timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a program of `build`; blocks and threads take turns in `order`."""
    environment = {
        **os.environ,
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


def _shim_jobs(out: Path) -> list[tuple[list[str], Path]]:
    """Arguments and target for each part of the shim, which is never built with a sanitizer."""
    folder = out / "shim"
    folder.mkdir(parents=True, exist_ok=True)
    targets = [(source, folder / f"{source.stem}.o") for source in sorted(HERE.glob("*.cpp"))]
    return [([*FLAGS, "-O2", "-c", str(s), "-o", str(t)], t) for s, t in targets]


def _is_current(target: Path, inputs: Sequence[Path]) -> bool:
    """Whether an object is newer than everything it is made from."""
    newest = max(path.stat().st_mtime for path in inputs)
    return target.exists() and target.stat().st_mtime > newest


def gcc(options: Sequence[str]) -> None:
    """Run g++; raises RuntimeError with what it said."""
    result = subprocess.run(["g++", *options], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"g++ {' '.join(options)}\n{result.stdout}{result.stderr}")


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
