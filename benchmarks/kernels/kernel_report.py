"""What nvcc makes of each CUDA kernel: registers, spills, occupancy, how wide its accesses are.

Needs nvcc and c++filt, no GPU. Instructions are counted in PTX, and in the machine code too where
cuobjdump is on the PATH: in the code, whether they run or not, and a kernel has a path a format.

    python benchmarks/kernels/kernel_report.py --arch 90
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernel_code import COUNTED, LIMITS, Kernel, add_ptx, add_sass, parse_ptxas, short_name

CSRC = Path(__file__).resolve().parents[2] / "csrc"
FLAGS = ["-std=c++20", "-O3", "-fmad=false"]  # build_tools/native.py's for device code
NO_NVCC = "no nvcc on the PATH or in /usr/local/cuda/bin"


def find_nvcc() -> str | None:
    """The CUDA compiler, where the build looks for it."""
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def why_unavailable() -> str | None:
    """The reason why there can be no report here, or None."""
    if not find_nvcc():
        return NO_NVCC
    return None if shutil.which("c++filt") else "no c++filt on the PATH"


def report(sources: Sequence[Path], arch: str, include: Path = CSRC) -> list[Kernel]:
    """The kernels of `sources` by name; two files are compiled at a time.

    Raises ValueError for an architecture that is not in LIMITS and RuntimeError without nvcc, or
    with what a compiler said.
    """
    if arch not in LIMITS:
        raise ValueError(f"arch: {arch!r} is not known here, expected one of {', '.join(LIMITS)}")
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError(f"{NO_NVCC}: install the CUDA toolkit's compiler")
    longest_first = sorted(sources, key=lambda source: source.stem != "apply")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=2) as pool:
        done = pool.map(lambda s: _compile(nvcc, s, arch, include, Path(folder)), longest_first)
        return sorted((k for kernels in done for k in kernels), key=lambda k: k.name)


def _compile(nvcc: str, source: Path, arch: str, include: Path, folder: Path) -> list[Kernel]:
    keep = folder / source.stem
    keep.mkdir()
    cubin = keep / "kernels.cubin"
    options = [*FLAGS, "-gencode", f"arch=compute_{arch},code=sm_{arch}", f"-I{include}"]
    options += ["-cubin", "--keep", "--keep-dir", str(keep), "-Xptxas", "-v", "-o", str(cubin)]
    kernels = parse_ptxas(_run([nvcc, *options, str(source)]))
    add_ptx(kernels, (keep / f"{source.stem}.ptx").read_text())
    if cuobjdump := shutil.which("cuobjdump"):
        add_sass(kernels, _run([cuobjdump, "-sass", str(cubin)]))
    names = _run(["c++filt"], "\n".join(kernels)).splitlines()
    for kernel, name in zip(kernels.values(), names, strict=True):
        kernel.name = short_name(name)
    return list(kernels.values())


def _run(command: list[str], text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def show(kernels: Sequence[Kernel], arch: str) -> None:
    """Tables of resources and of instructions, by rich where it is installed."""
    columns = ["kernel", "registers", "spilt", "stack", "shared", "arguments", "threads"]
    rows: list[list[object]] = [
        [
            *(k.name, k.registers, f"{k.spill_stores}/{k.spill_loads}", k.stack, k.shared),
            *(k.arguments, k.threads, f"{k.blocks(arch)}/{k.asked}", k.warps(arch)),
            f"{k.warps(arch) / LIMITS[arch][0]:.0%}",
        ]
        for k in kernels
    ]
    _print(f"sm_{arch}", [*columns, "blocks/asked", "warps", "occupancy"], rows)
    for title, counts in (("PTX", [k.ptx for k in kernels]), ("SASS", [k.sass for k in kernels])):
        pairs = zip(kernels, counts, strict=True)
        rows = [[k.name, *(c[what] for what in COUNTED)] for k, c in pairs if c is not None]
        if rows:
            _print(f"instructions in {title}", ["kernel", *COUNTED], rows)


def _print(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(f"{title}\n" + "\n".join("\t".join(map(str, row)) for row in [columns, *rows]))
        return
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="90", choices=LIMITS, help="compute capability, no dot")
    parser.add_argument("sources", nargs="*", type=Path, help="default: all of csrc/cuda")
    given = parser.parse_args()
    if reason := why_unavailable():
        raise SystemExit(f"no report: {reason}")
    show(report(given.sources or sorted(CSRC.glob("cuda/*.cu")), given.arch), given.arch)


if __name__ == "__main__":
    main()
