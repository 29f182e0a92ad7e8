"""What ptxas, PTX and machine code tell of a CUDA kernel, and how many a multiprocessor holds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sass import Function

REGISTERS = 65536  # of a multiprocessor, on every architecture
# By architecture: warps, blocks and kilobytes of shared memory of a multiprocessor.
LIMITS = {
    **{"75": (32, 16, 64), "80": (64, 32, 164), "86": (48, 16, 100), "89": (48, 24, 100)},
    **{"90": (64, 32, 228), "100": (64, 32, 228), "120": (48, 24, 100)},
}
# What instructions are counted as. Loads and stores are of global memory, wide from 16 bytes on;
# generic are those of an address whose space the compiler does not know.
COUNTED = (
    *("wide loads", "narrow loads", "wide stores", "narrow stores"),
    *("local", "generic", "fma", "double", "calls"),
)


@dataclass
class Kernel:
    """One kernel for one architecture. Sizes are in bytes."""

    name: str = ""
    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    shared: int = 0  # static
    arguments: int = 0  # in constant memory
    threads: int = 1024  # of a block, at most; CUDA's own limit where the kernel names none
    asked: int = 1  # blocks a multiprocessor, by __launch_bounds__
    ptx: Counter[str] = field(default_factory=Counter)
    sass: Counter[str] | None = None  # None without nvdisasm
    code: Function | None = None  # the same

    def blocks(self, arch: str) -> int:
        """How many blocks of `threads` a multiprocessor of LIMITS holds at once."""
        warps, blocks, shared = LIMITS[arch]
        # A quarter of the registers belongs to each of four schedulers; a warp gets units of 256.
        by_registers = 4 * (REGISTERS // 4 // (32 * _round_up(self.registers, 8)))
        by_shared = shared * 1024 // (self.shared + 1024)  # a kilobyte a block is CUDA's own
        return min(blocks, by_shared, min(warps, by_registers) * 32 // _round_up(self.threads, 32))

    def warps(self, arch: str) -> int:
        """How many warps a multiprocessor of LIMITS holds at once."""
        return self.blocks(arch) * _round_up(self.threads, 32) // 32


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def short_name(demangled: str) -> str:
    """Name and template arguments alone: no return type, namespaces and parameters."""
    name = re.sub(r"\(anonymous namespace\)::|\b\w+::", "", demangled)
    return name.split("(")[0].removeprefix("void ").replace(" >", ">")


def parse_ptxas(text: str) -> dict[str, Kernel]:
    """What `ptxas -v` says of each kernel, by its mangled name.

    What functions that were not inlined need is added to the kernel that calls them.
    """
    kernels: dict[str, Kernel] = {}
    kernel = None
    for line in text.splitlines():
        if found := re.search(r"Compiling entry function '(\S+)'", line):
            kernel = kernels[found[1]] = Kernel()
        if kernel is None:
            continue
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
    """Add what only PTX tells: arguments, launch bounds and instructions.

    Raises ValueError where `text` has not the same kernels.
    """
    seen = set()
    for entry in text.split(".entry ")[1:]:
        head, body = entry.split("{", 1)
        name, rest = head.split("(", 1)
        parameters, bounds = rest.split(")", 1)
        seen.add(name)
        if name not in kernels:
            continue
        kernel = kernels[name]
        for bits, count in re.findall(r"\.[busf](\d+) [^,\[]*(?:\[(\d+)\])?", parameters):
            size = int(bits) // 8
            aligned = _round_up(kernel.arguments, 8 if count else size)
            kernel.arguments = aligned + size * int(count or 1)
        if found := re.search(r"\.maxntid (\d+)(?:, (\d+), (\d+))?", bounds):
            kernel.threads = int(found[1]) * int(found[2] or 1) * int(found[3] or 1)
        if found := re.search(r"\.minnctapersm (\d+)", bounds):
            kernel.asked = int(found[1])
        body = body.split("\n}", 1)[0]
        opcodes = re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][\w.:]+)", body, re.MULTILINE)
        kernel.ptx = Counter(c for o in opcodes for c in _of_ptx(o.split(".")))
    if seen != set(kernels):
        raise ValueError(f"in PTX or in ptxas's output alone: {sorted(seen ^ set(kernels))}")


def add_code(kernels: dict[str, Kernel], functions: Mapping[str, Function]) -> None:
    """Add the machine code, and what is counted in it.

    Raises ValueError where `functions` are not the same kernels.
    """
    if set(functions) != set(kernels):
        wrong = sorted(set(functions) ^ set(kernels))
        raise ValueError(f"in machine code or in ptxas's output alone: {wrong}")
    for name, function in functions.items():
        opcodes = [one.opcode.split(".") for one in function.instructions]
        kernels[name].code = function
        kernels[name].sass = Counter(c for parts in opcodes for c in _of_sass(parts))


def _of_ptx(parts: list[str]) -> Iterator[str]:
    kind, width = parts[0], re.fullmatch(r"[bfsu](\d+)", parts[-1])
    if kind in ("ld", "st") and width:
        vector = next((int(p[1]) for p in parts if re.fullmatch(r"v[248]", p)), 1)
        if "global" in parts:
            reach = "wide" if vector * int(width[1]) >= 128 else "narrow"
            yield f"{reach} {'loads' if kind == 'ld' else 'stores'}"
        elif "local" in parts:
            yield "local"
        elif not any(p.startswith(("shared", "param", "const")) for p in parts):
            yield "generic"
        return
    if kind in ("fma", "mad") and re.match(r"b?f", parts[-1]):
        yield "fma"
    if "f64" in parts and kind not in ("mov", "selp"):
        yield "double"
    if kind == "call":
        yield "calls"


def _of_sass(parts: list[str]) -> Iterator[str]:
    kind = parts[0]
    if kind in ("LDG", "STG"):
        reach = "wide" if {"128", "256"} & set(parts) else "narrow"
        yield f"{reach} {'loads' if kind == 'LDG' else 'stores'}"
    if kind in ("LDL", "STL"):
        yield "local"
    if kind in ("LD", "ST"):
        yield "generic"
    if kind in ("FFMA", "DFMA"):  # what division and square root are made of
        yield "fma"
    if kind in ("DADD", "DMUL", "DFMA", "DSETP", "DMNMX"):
        yield "double"
    if kind == "CALL":
        yield "calls"
