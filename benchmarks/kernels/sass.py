"""Machine code of CUDA kernels: nvdisasm's listing of a cubin as instructions.

The control word of an instruction, which the compiler fills, says how long its warp waits after it
(stall), which of six barriers it raises when it has written or read its registers, and which
barriers it waits for.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from sass_operands import Operand, parse_operands

NO_NVDISASM = "no nvdisasm on the PATH or in the nvidia-cuda-nvdisasm package"
NO_BARRIER = 7
_FUNCTION = re.compile(r"^\.text\.(\S+):")
_LABEL = re.compile(r"^(\.L_\S+|\$\S+):")
_INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;\s+/\* 0x[0-9a-f]{16} "
)
_UPPER = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")


@dataclass(frozen=True)
class Control:
    """What a control word says."""

    stall: int
    written: int  # barrier to raise until the result is there, or NO_BARRIER
    read: int  # barrier to raise until the operands have been read, or NO_BARRIER
    waits: int  # bit mask of barriers to wait for before the instruction

    @staticmethod
    def of(upper: int) -> Control:
        """The control bits in the upper half of an instruction of 128 bits."""
        bits = upper >> 41
        return Control(bits & 15, bits >> 5 & 7, bits >> 8 & 7, bits >> 11 & 63)


@dataclass
class Instruction:
    """One line of the listing."""

    address: int
    guard: str  # the predicate it runs under, "!P0"; "" for none
    opcode: str  # with its modifiers, "LDG.E.128"
    text: str  # the operands as printed
    control: Control

    @cached_property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".", 1)[0]

    @cached_property
    def modifiers(self) -> frozenset[str]:
        """What the opcode has behind its first dot."""
        return frozenset(self.opcode.split(".")[1:])

    @cached_property
    def operands(self) -> list[Operand]:
        """The operands in order."""
        return parse_operands(self.text)

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{self.address:#06x}: {guard}{self.opcode} {self.text}".rstrip()


@dataclass
class Function:
    """One kernel, with the subroutines that are placed behind it."""

    name: str  # mangled
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # index of the instruction behind
    constants: dict[int, bytes] = field(default_factory=dict)  # by bank; tables of jumps are in 2

    @cached_property
    def index_at(self) -> Mapping[int, int]:
        """The index of the instruction at an address."""
        return {one.address: i for i, one in enumerate(self.instructions)}


def parse(text: str) -> dict[str, Function]:
    """The functions that `nvdisasm -hex -c` lists, by mangled name.

    Raises ValueError for an instruction whose second half is not on the next line.
    """
    functions: dict[str, Function] = {}
    function = None
    lines = iter(text.splitlines())
    for line in lines:
        if found := _INSTRUCTION.match(line):
            if function is None:
                raise ValueError(f"an instruction outside of a function: {line.strip()}")
            upper = _UPPER.match(next(lines, ""))
            if upper is None:
                raise ValueError(f"no control word behind: {line.strip()}")
            control = Control.of(int(upper[1], 16))
            one = Instruction(int(found[1], 16), found[2] or "", found[3], found[4], control)
            function.instructions.append(one)
        elif found := _FUNCTION.match(line):
            function = functions[found[1]] = Function(found[1])
        elif function is not None and (found := _LABEL.match(line)):
            function.labels[found[1]] = len(function.instructions)
    return functions


def find_nvdisasm() -> str | None:
    """NVIDIA's disassembler: on the PATH, with a toolkit, or from the Python package."""
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    folders = [f"{p}/nvidia/{cuda}/bin" for p in sorted(packages) for cuda in ("cu13", "cu14")]
    for path in (None, "/usr/local/cuda/bin", *folders):
        if found := shutil.which("nvdisasm", path=path):
            return found
    return None


def disassemble(cubin: Path) -> dict[str, Function]:
    """The functions of a cubin. Raises RuntimeError without nvdisasm or with what it said."""
    nvdisasm = find_nvdisasm()
    if nvdisasm is None:
        raise RuntimeError(f"{NO_NVDISASM}: pip install nvidia-cuda-nvdisasm")
    done = subprocess.run(
        [nvdisasm, "-hex", "-c", str(cubin)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{nvdisasm} {cubin}\n{done.stdout[-2000:]}{done.stderr}")
    functions = parse(done.stdout)
    for section, content in _sections(cubin.read_bytes()):
        if found := re.match(r"\.nv\.constant([1-9])\.(.+)", section):
            functions[found[2]].constants[int(found[1])] = content
    return functions


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the sections of an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<3H", elf, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", elf, table + n * size) for n in range(count)]
    strings = heads[names][4]
    for name, kind, _, _, at, length in heads:
        start = strings + name
        content = elf[at : at + length] if kind != 8 else bytes(length)  # 8: zeros, not stored
        yield elf[start : elf.index(b"\0", start)].decode(), content
