"""What nvcc makes of each CUDA kernel: registers, spills, occupancy, width of accesses, loops.

Needs nvcc, c++filt and nvdisasm, no GPU. ptxas tells registers and spills, PTX launch bounds and
fused multiply-adds, nvdisasm the instructions: in all of a kernel, whether they run or not, and in
the body of each loop that reads 16 bytes at once. An apply kernel has one such loop for each layout
(csrc/cuda/layouts.h) and one for any formats; each holds the way of whole packs of eight elements,
that of single ones, and that of numbers which quick divisions cannot do.

    python benchmarks/kernels/kernel_report.py [csrc/cuda/apply.cu]
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from build_tools.generated import families_of  # noqa: E402

CSRC = ROOT / "csrc"
FLAGS = ["-std=c++20", "-O3", "-fmad=false"]  # build_tools/native.py's for device code
ARCH = "90"
# Of a multiprocessor of that architecture.
REGISTERS, WARPS, BLOCKS, SHARED = 65536, 64, 32, 228 * 1024
# What instructions of machine code are counted as. Loads and stores are of global memory, wide from
# 16 bytes on; generic are those of an address whose space the compiler does not know. Clamp tests
# are an integer's maximum with 0, its minimum and a comparison in one: ptxas 13.0 makes them of
# min(max(n, 0), 8) == 8, and on an H100 they hold for n = 0 (csrc/cuda/pack8.h).
COUNTED = (
    *("wide loads", "narrow loads", "wide stores", "narrow stores"),
    *("local", "generic", "clamp tests"),
)


@dataclass
class Kernel:
    """One kernel for ARCH. Sizes are in bytes."""

    name: str = ""
    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    shared: int = 0  # static
    threads: int = 1024  # of a block, at most; CUDA's own limit where the kernel names none
    asked: int = 1  # blocks a multiprocessor, by __launch_bounds__
    fused: int = 0  # multiply-adds in PTX, which has none of nvcc's own roots and quotients
    calls: int = 0  # in PTX: functions that were not inlined
    code: Counter[str] = field(default_factory=Counter)  # of COUNTED, and all "instructions"
    loops: list[Counter[str]] = field(default_factory=list)  # the same, of each loop's body

    def blocks(self) -> int:
        """How many blocks of `threads` a multiprocessor holds at once."""
        # A quarter of the registers belongs to each of four schedulers; a warp gets units of 256.
        by_registers = 4 * (REGISTERS // 4 // (32 * _round_up(self.registers, 8)))
        by_shared = SHARED // (self.shared + 1024)  # a kilobyte a block is CUDA's own
        return min(BLOCKS, by_shared, min(WARPS, by_registers) * 32 // _round_up(self.threads, 32))


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def short_name(demangled: str) -> str:
    """Name and template arguments alone: no return type, namespaces and parameters."""
    name = re.sub(r"\(anonymous namespace\)::|\b\w+::", "", demangled)
    return name.split("(")[0].removeprefix("void ").replace(" >", ">")


def find(program: str) -> str | None:
    """A program of CUDA: on the PATH, with the toolkit, or (nvdisasm) from its Python package."""
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    folders = [f"{p}/nvidia/{cuda}/bin" for p in sorted(packages) for cuda in ("cu13", "cu14")]
    found = (shutil.which(program, path=p) for p in (None, "/usr/local/cuda/bin", *folders))
    return next(filter(None, found), None)


def why_unavailable() -> str | None:
    """The reason why there can be no report here, or None."""
    missing = [name for name in ("nvcc", "nvdisasm", "fatbinary", "c++filt") if not find(name)]
    return f"no {missing[0]} on the PATH or in /usr/local/cuda/bin" if missing else None


def parse_ptxas(text: str) -> dict[str, Kernel]:
    """What `ptxas -v` says of each kernel, by its mangled name.

    What functions that were not inlined need is added to the kernel that calls them.
    """
    kernels: dict[str, Kernel] = {}
    kernel = Kernel()
    for line in text.splitlines():
        if found := re.search(r"Compiling entry function '(\S+)'", line):
            kernel = kernels[found[1]] = Kernel()
        if found := re.search(r"(\d+) bytes stack frame, (\d+) .*stores, (\d+) .*loads", line):
            kernel.stack += int(found[1])
            kernel.spill_stores += int(found[2])
            kernel.spill_loads += int(found[3])
        if found := re.search(r"Used (\d+) registers", line):
            kernel.registers = int(found[1])
            shared = re.search(r"(\d+) bytes smem", line)
            kernel.shared = int(shared[1]) if shared else 0
    return kernels


def add_ptx(kernels: dict[str, Kernel], text: str) -> None:
    """Add what only PTX tells: launch bounds, fused multiply-adds, calls."""
    for entry in text.split(".entry ")[1:]:
        head, body = entry.split("{", 1)
        kernel = kernels[head.split("(", 1)[0]]
        if found := re.search(r"\.maxntid (\d+)(?:, (\d+), (\d+))?", head):
            kernel.threads = int(found[1]) * int(found[2] or 1) * int(found[3] or 1)
        if found := re.search(r"\.minnctapersm (\d+)", head):
            kernel.asked = int(found[1])
        body = body.split("\n}", 1)[0]
        kernel.fused = len(re.findall(r"\s(?:fma|mad)\.[\w.]*\bb?f\d", body))
        kernel.calls = len(re.findall(r"\scall\b", body))


def add_code(kernels: dict[str, Kernel], listing: str) -> None:
    """Add what is counted in nvdisasm's listing, and the loops: up to each branch backwards."""
    for part in re.split(r"^\.text\.", listing, flags=re.MULTILINE)[1:]:
        name, text = part.split(":", 1)
        kernel, counts, labels = kernels[name], [Counter[str]()], dict[str, int]()
        for label, opcode, operands in re.findall(
            r"^(\.L_\S+):|^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)([^;]*);", text, re.M
        ):
            if label:
                labels[label] = len(counts) - 1
                continue
            counts.append(counts[-1] + Counter({"instructions": 1, _kind(opcode, operands): 1}))
            target = re.search(r"`\((\S+)\)", operands)
            if opcode.startswith("BRA") and target and target[1] in labels:
                body = counts[-1] - counts[labels[target[1]]]
                kernel.loops += [body] if body["wide loads"] else []
        kernel.code = counts[-1]


def _kind(opcode: str, operands: str) -> str:
    name, *modifiers = opcode.split(".")
    # The second operand is a predicate that it writes; one at the end chooses minimum or maximum.
    if "VIMNMX" in name and "RELU" in modifiers and re.match(r"\s*U?R\w+, U?P[0-6]\b", operands):
        return "clamp tests"
    if name in ("LDG", "STG"):
        reach = "wide" if {"128", "256"} & {*modifiers} else "narrow"
        return f"{reach} {'loads' if name == 'LDG' else 'stores'}"
    return {"LDL": "local", "STL": "local", "LD": "generic", "ST": "generic"}.get(name, "others")


def report(sources: Sequence[Path]) -> tuple[list[Kernel], dict[str, int]]:
    """The kernels of `sources` by name, and each unit's bytes in the library.

    A source with rules is a unit for each family of them. Two are compiled at a time. Raises
    RuntimeError with what a compiler said.
    """
    units = [(source, family) for source in sources for family in families_of(source)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=2) as pool:
        done = list(pool.map(lambda unit: _compile(*unit, Path(folder)), units))
    names = [" ".join(filter(None, (source.name, family))) for source, family in units]
    sizes = {name: size for name, (_, size) in zip(names, done, strict=True)}
    return sorted((k for some, _ in done for k in some), key=lambda kernel: kernel.name), sizes


def _compile(source: Path, family: str, folder: Path) -> tuple[list[Kernel], int]:
    keep = folder / f"{source.stem}-{family}"
    keep.mkdir()
    cubin = keep / "kernels.cubin"
    options = [*FLAGS, "-gencode", f"arch=compute_{ARCH},code=sm_{ARCH}", f"-I{CSRC}"]
    options += [f"-DAMP_MP_FAMILY={family}"] if family else []
    options += ["-cubin", "--keep", "--keep-dir", str(keep), "-Xptxas", "-v", "-o", str(cubin)]
    kernels = parse_ptxas(_run("nvcc", *options, str(source)))
    if kernels:
        add_ptx(kernels, (keep / f"{source.stem}.ptx").read_text())
        add_code(kernels, _run("nvdisasm", "-c", str(cubin)))
        names = _run("c++filt", *kernels).splitlines()
        for kernel, name in zip(kernels.values(), names, strict=True):
            kernel.name = short_name(name)
    # The build compresses machine code.
    packed, image = keep / "kernels.fatbin", f"--image3=kind=elf,sm={ARCH},file={cubin}"
    _run("fatbinary", f"--create={packed}", "-64", "--compress-all", image)
    return list(kernels.values()), packed.stat().st_size


def _run(program: str, *arguments: str) -> str:
    command = [find(program) or program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def size_without_kernels(root: Path = ROOT) -> int | None:
    """Bytes of the built library besides its machine code for GPUs; None where it is not built."""
    built = sorted(root.glob("python/amp_mp/native/*.so"))
    if not built or not shutil.which("readelf"):
        return None
    sections = _run("readelf", "-SW", str(built[0]))
    kernels = re.findall(r" \.nv_fatbin +\S+ +\w+ +\w+ +(\w+)", sections)
    return built[0].stat().st_size - sum(int(size, 16) for size in kernels)


def show(kernels: Sequence[Kernel]) -> None:
    """A line for each kernel and for each of its loops, separated by tabs."""
    heads = ["kernel", "registers", "spilt", "stack", "shared", "blocks/asked", "instructions"]
    print(*heads, *COUNTED, sep="\t")
    for k in kernels:
        spilt, blocks = f"{k.spill_stores}/{k.spill_loads}", f"{k.blocks()}/{k.asked}"
        first = (k.name, k.registers, spilt, k.stack, k.shared, blocks)
        for row, counts in [(first, k.code), *((("  loop", *[""] * 5), loop) for loop in k.loops)]:
            print(*row, *(counts[what] for what in ("instructions", *COUNTED)), sep="\t")


if __name__ == "__main__":
    if reason := why_unavailable():
        raise SystemExit(f"no report: {reason}")
    found, sizes = report([*map(Path, sys.argv[1:])] or sorted(CSRC.glob("cuda/*.cu")))
    show(found)
    print(*(f"{name}: {size / 1e6:.2f} MB" for name, size in sizes.items()), sep="\n")
