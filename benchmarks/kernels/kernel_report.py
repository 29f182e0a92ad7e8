"""What nvcc makes of each CUDA kernel: registers, spills, occupancy, how wide its accesses are.

Needs nvcc and c++filt, no GPU. Instructions are counted in PTX and, with nvdisasm, in machine code:
in all of it, whether it runs or not. For the presets of `memory=` the machine code of the apply
kernels is also run for one warp, which needs g++ (kernel_path.py): one iteration's instructions,
waits for the memory and estimated speed on an H100.

    python benchmarks/kernels/kernel_report.py
    python benchmarks/kernels/kernel_report.py --path-only    # the apply kernels' tables alone
    python benchmarks/kernels/kernel_report.py --arch 80      # resources on another GPU
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import recorded_step
from kernel_code import LIMITS, Kernel, add_code, add_ptx, parse_ptxas, short_name
from kernel_path import ARCH, PRESETS, RULES, Measured, measure
from kernel_tables import progress, show, show_library, show_paths
from sass import NO_NVDISASM, disassemble, find_nvdisasm

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
FLAGS = ["-std=c++20", "-O3", "-fmad=false"]  # build_tools/native.py's for device code
NO_NVCC = "no nvcc on the PATH or in /usr/local/cuda/bin"


@dataclass
class Report:
    """What compiling has shown. By source: seconds of processor time, bytes in the library."""

    kernels: list[Kernel] = field(default_factory=list)  # by name
    seconds: dict[str, float] = field(default_factory=dict)
    cubins: dict[str, int] = field(default_factory=dict)


def find_nvcc() -> str | None:
    """The CUDA compiler, where the build looks for it."""
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def why_unavailable() -> str | None:
    """The reason why there can be no report here, or None."""
    if not find_nvcc():
        return NO_NVCC
    return None if shutil.which("c++filt") else "no c++filt on the PATH"


def why_no_paths(arch: str = ARCH) -> str | None:
    """The reason why machine code cannot be followed here, or None."""
    if arch != ARCH:
        return f"paths are followed in machine code of sm_{ARCH} alone"
    if not find_nvdisasm():
        return NO_NVDISASM
    return recorded_step.why_unavailable("plain")


def report(sources: Sequence[Path], arch: str) -> Report:
    """The kernels of `sources`; two files are compiled at a time.

    Raises ValueError for an architecture that is not in LIMITS and RuntimeError without nvcc, or
    with what a compiler said.
    """
    if arch not in LIMITS:
        raise ValueError(f"arch: {arch!r} is not known here, expected one of {', '.join(LIMITS)}")
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError(f"{NO_NVCC}: install the CUDA toolkit's compiler")
    longest_first = sorted(sources, key=lambda source: source.stem != "apply")
    found = Report()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=2) as pool:
        done = pool.map(lambda s: _compile(nvcc, s, arch, Path(folder)), longest_first)
        for source, one in zip(
            longest_first, progress(done, len(sources), "compiling"), strict=True
        ):
            found.kernels += one.kernels
            found.seconds[source.name] = sum(one.seconds.values())
            found.cubins[source.name] = sum(one.cubins.values())
    found.kernels.sort(key=lambda kernel: kernel.name)
    return found


def _compile(nvcc: str, source: Path, arch: str, folder: Path) -> Report:
    keep = folder / source.stem
    keep.mkdir()
    cubin = keep / "kernels.cubin"
    options = [*FLAGS, "-gencode", f"arch=compute_{arch},code=sm_{arch}", f"-I{CSRC}"]
    options += ["-cubin", "--keep", "--keep-dir", str(keep), "-Xptxas", "-v", "-o", str(cubin)]
    said, seconds = _run_timed([nvcc, *options, str(source)])
    kernels = parse_ptxas(said)
    add_ptx(kernels, (keep / f"{source.stem}.ptx").read_text())
    if find_nvdisasm() and kernels:
        add_code(kernels, disassemble(cubin))
    names = _run(["c++filt"], "\n".join(kernels)).splitlines()
    for kernel, name in zip(kernels.values(), names, strict=True):
        kernel.name = short_name(name)
    size = _size_in_library(cubin, arch)
    return Report(list(kernels.values()), {source.name: seconds}, {source.name: size})


def _size_in_library(cubin: Path, arch: str) -> int:
    """Bytes of the machine code, compressed if the build compresses it."""
    compresses = "-compress-all" in (ROOT / "build_tools/native.py").read_text()
    found = shutil.which("fatbinary") or shutil.which("fatbinary", path="/usr/local/cuda/bin")
    if not compresses or found is None:
        return cubin.stat().st_size
    packed = cubin.with_suffix(".fatbin")
    image = f"--image3=kind=elf,sm={arch},file={cubin}"
    _run([found, f"--create={packed}", "-64", "--compress-all", image])
    return packed.stat().st_size


def _run(command: list[str], text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def _run_timed(command: list[str]) -> tuple[str, float]:
    """What a command said, and the seconds of processor time that it took."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{said}")
    return said, used.ru_utime + used.ru_stime


def paths(kernels: Sequence[Kernel], recorder: Path) -> list[Measured]:
    """The main path of apply_kernel for every rule, preset and alignment."""
    work = [(rule, preset, skew) for skew in (0, 1) for rule in RULES for preset in PRESETS]
    shown = progress(work, len(work), "following")
    return [measure(kernels, recorder, *one) for one in shown]


def size_without_kernels(root: Path = ROOT) -> int | None:
    """Bytes of the built library besides its machine code for GPUs; None where it is not built."""
    built = sorted(root.glob("python/amp_mp/native/*.so"))
    if not built or not shutil.which("readelf"):
        return None
    sections = _run(["readelf", "-SW", str(built[0])])
    kernels = re.findall(r" \.nv_fatbin +\S+ +\w+ +\w+ +(\w+)", sections)
    return built[0].stat().st_size - sum(int(size, 16) for size in kernels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default=ARCH, choices=LIMITS, help="compute capability, no dot")
    parser.add_argument("--path-only", action="store_true", help="only the paths of apply.cu")
    parser.add_argument("sources", nargs="*", type=Path, help="default: all of csrc/cuda")
    given = parser.parse_args()
    if reason := why_unavailable():
        raise SystemExit(f"no report: {reason}")
    sources = given.sources or sorted(CSRC.glob("cuda/*.cu"))
    if given.path_only:
        sources = [CSRC / "cuda/apply.cu"]
    found = report(sources, given.arch)
    if not given.path_only:
        show(found.kernels, given.arch)
    if reason := why_no_paths(given.arch):
        print(f"no paths: {reason}")
    elif any(kernel.name.startswith("apply_kernel<") for kernel in found.kernels):
        with tempfile.TemporaryDirectory() as folder:
            recorder = recorded_step.build_recorder(Path(folder), RULES)
            show_paths(paths(found.kernels, recorder), given.arch)
    show_library(found.seconds, found.cubins, None if given.sources else size_without_kernels())


if __name__ == "__main__":
    main()
