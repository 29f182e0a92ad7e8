"""What nvcc makes of the kernels, for sm_90: no spills, wide accesses, short loops.

benchmarks/kernels/kernel_report.py reads it from ptxas, PTX and nvdisasm.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import kernel_report
import pytest
from kernel_report import Kernel, add_code, add_ptx, parse_ptxas, short_name

from amp_mp.optim.rule import Rule

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from build_tools import found  # noqa: E402

FIRST_HALVES = ("update_sums_kernel", "directions_kernel")
APPLY = ("apply_kernel", "apply_noting_kernel")
FLOAT8 = {"float8_kernel": 8, "mxfp8_kernel": 1}  # eights of elements that a thread reads in a row
HOT = (*APPLY, "average_kernel", "compare_kernel", "copy_kernel", "measure_kernel", *FIRST_HALVES)
HOT += tuple(FLOAT8)
_HEADERS = "".join(path.read_text() for path in (ROOT / "csrc/core/rules").glob("*.h"))
LISTED = dict(re.findall(r"  X\((\w+), (\w+)\)", _HEADERS))
STATES = {rule: len(Rule(operator).names) for rule, operator in LISTED.items()}
STATES |= {"Amsgrad": STATES["AmsgradAdamW"]}
_TEXTS = dict(re.findall(r"^struct (\w+) \{\n(.*?)^\};", _HEADERS, re.MULTILINE | re.DOTALL))
# Loops of an apply kernel: one for each layout of csrc/cuda/layouts.h, the presets of `memory=`,
# and one for any formats. A noting kernel has AdamW's, and for other rules the last one.
LOOPS = {"AdamW": 7, "Adam": 7, "RMSprop": 7, "SGD": 5, "Lion": 5, "PlainRMSprop": 5}
# 16-byte pieces of eight elements of an array that may be float32, and of a format's second.
ARRAY, SECOND = 2, 1
DIRECTION = 1  # always bfloat16
PACK_FUSED = 8 * 6  # fused multiply-adds of a root and a quotient, for eight elements
# AdamW's loops by preset, in the order of their wide stores: 16-byte pieces that eight elements
# store, and instructions of the body at most, 2 % above what CUDA 13.0 makes. A loop has the ways
# for single elements and for odd numbers besides, so most of its instructions do not run.
ADAMW_LOOPS = {
    "float32": (2 + 2 + 2 + 1, 2170),  # master, two states, a copy
    "exact": (1 + 1 + 2 + 2, 1860),  # weight, remainder, two states
    "lean": (1 + 1 + 1, 3120),  # weight, bfloat16, ue8m8; the rest is 8 bytes
    "tiny": (1 + 1, 3340),  # weight, ue8m8
    "micro": (1, 3650),
    "nano": (1, 4940),
}
# For any one architecture. A wheel for several has as many times the machine code.
MOST_BYTES = 8e6


def wide_accesses(name: str, two_pass: set[str]) -> tuple[int, int]:
    """The 16-byte loads and stores that a kernel's arrays take, at the least.

    `two_pass` are the rules whose states were advanced by another kernel: apply_kernel then needs
    no gradient and stores no state. After directions_kernel (Muon) both read the update alone.
    """
    kind, _, rule = name.removesuffix(">").partition("<")
    if kind == "measure_kernel":  # four rows in flight of float32, float16 and bfloat16
        splits = rule.startswith("2")  # pointers for each tensor
        return 4 * (2 + 1 + 1) + (ARRAY + SECOND if splits else 0), 0
    if kind == "compare_kernel":  # float32 before and after, and 16-bit ones
        return 2 * (ARRAY + 1), 0
    if kind in FLOAT8:  # of float32, or of 16 bits; codes are 8 bytes
        return FLOAT8[kind] * (ARRAY if rule == "true" else 1), 0
    if kind == "copy_kernel":
        return ARRAY + SECOND, ARRAY + SECOND
    if kind == "average_kernel":
        return 2 * (ARRAY + SECOND), ARRAY + SECOND
    if kind not in HOT:
        return 0, 0
    states = STATES[rule.split("<")[0]] * ARRAY
    gradient, master, weight = ARRAY, ARRAY + SECOND, ARRAY
    if rule.startswith("Muon") and kind == "update_sums_kernel":
        return DIRECTION + master, 0
    if kind == "update_sums_kernel":
        return gradient + master + states, states
    if kind == "directions_kernel":
        return gradient + ARRAY, ARRAY + DIRECTION
    if rule.startswith("Muon"):
        return DIRECTION + master, master + weight
    if rule in two_pass:
        return master + states, master + weight
    return gradient + master + states, master + weight + states


def fused_of(name: str) -> int:
    """How many fused multiply-adds a kernel has to have.

    Those of cuda/quotient.h, in an apply kernel whose rule divides by a root: for whole packs and
    for any elements of each layout, and once for any formats. nvcc's own roots and quotients do not
    show theirs in PTX; any other is one that nvcc must not make of a product and a sum.
    """
    kind, _, rule = name.rstrip(">").partition("<")
    divides = kind in APPLY and "RootDivisor divide;" in _TEXTS[rule.split("<")[0]]
    loops = LOOPS.get(rule, 1) if kind == APPLY[0] or rule == "AdamW" else 1
    return PACK_FUSED * (2 * loops - 1) if divides else 0


def faults(kernel: Kernel, two_pass: set[str]) -> list[str]:
    """What is wrong with a kernel, a line each."""
    code, hot = kernel.code, kernel.name.startswith(HOT)
    spilt, fused = max(kernel.spill_stores, kernel.spill_loads), fused_of(kernel.name)
    loads, stores = wide_accesses(kernel.name, two_pass)
    clamps = code["clamp tests"]
    found = {
        f"{spilt} bytes spill": spilt > 0,
        f"a stack frame of {kernel.stack} bytes": kernel.stack > 0 and spilt == 0,
        f"{code['local']} accesses of local memory: an array that is indexed": code["local"] > 0,
        f"{kernel.blocks()} blocks fit, {kernel.asked} are asked for": kernel.blocks()
        < kernel.asked,
        f"{kernel.fused} fused multiply-adds, {fused} are wanted": kernel.fused != fused,
        f"{clamps} clamps with a comparison, which is wrong for 0": clamps > 0,
        f"{code['generic']} generic accesses": hot and code["generic"] > 0,
        f"{kernel.calls} calls": hot and kernel.calls > 0,
        f"{code['wide loads']} wide loads, {loads} are needed": code["wide loads"] < loads,
        f"{code['wide stores']} wide stores, {stores} are needed": code["wide stores"] < stores,
    }
    return [text for text, is_wrong in found.items() if is_wrong]


@pytest.mark.kernels
@pytest.mark.slow
def test_kernels_have_no_instruction_that_the_oldest_architecture_lacks(tmp_path: Path) -> None:
    """compare.cu compiles in seconds and includes our own asm; the other tests compile for 9.0."""
    if (nvcc := kernel_report.find("nvcc")) is None:
        pytest.skip("no nvcc")
    oldest = found.ARCHITECTURES[0].replace(".", "")
    target = f"arch=compute_{oldest},code=sm_{oldest}"
    command = [nvcc, *kernel_report.FLAGS, "-gencode", target, f"-I{ROOT / 'csrc'}", "-cubin"]
    command += ["-o", str(tmp_path / "kernels.cubin"), str(ROOT / "csrc/cuda/compare.cu")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def compiled() -> tuple[list[Kernel], dict[str, int]]:
    """Kernels and sizes of csrc/cuda; tests that use them are slow and in one xdist_group."""
    if reason := kernel_report.why_unavailable():
        pytest.skip(f"the kernels are not compiled: {reason}")
    longest_first = sorted((ROOT / "csrc/cuda").glob("*.cu"), key=lambda p: p.stem != "apply")
    return kernel_report.report(longest_first)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.xdist_group("kernel_report")
def test_no_kernel_spills_or_is_narrow(compiled: tuple[list[Kernel], dict[str, int]]) -> None:
    names = [kernel.name for kernel in compiled[0]]
    rules = [re.sub(r"^Amsgrad(\w+)$", r"Amsgrad<\1>", rule) for rule in LISTED]  # aliases in C++
    for kind in APPLY:
        applied = [name for name in names if name.startswith(f"{kind}<")]
        assert sorted(applied) == sorted(f"{kind}<{rule}>" for rule in rules)
    for hot in HOT:
        assert any(name.startswith(hot) for name in names), f"no {hot} among {names}"
    two_pass = {n.partition("<")[2][:-1] for n in names if n.startswith(FIRST_HALVES)}
    found = {k.name: faults(k, two_pass) for k in compiled[0]}
    wrong = {name: lines for name, lines in found.items() if lines}
    assert not wrong, "\n".join(f"{name}: {', '.join(lines)}" for name, lines in wrong.items())


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.xdist_group("kernel_report")
def test_each_layout_has_one_loop_and_adamws_are_short(
    compiled: tuple[list[Kernel], dict[str, int]],
) -> None:
    noting, loops = (
        {k.name[len(kind) + 1 : -1]: k.loops for k in compiled[0] if k.name.startswith(f"{kind}<")}
        for kind in reversed(APPLY)
    )
    assert {rule: len(found) for rule, found in loops.items()} == dict.fromkeys(loops, 1) | LOOPS
    of_adamw = {"AdamW": LOOPS["AdamW"]}
    assert {rule: len(found) for rule, found in noting.items()} == dict.fromkeys(
        loops, 1
    ) | of_adamw
    *presets, _ = sorted(loops["AdamW"], key=lambda loop: loop["instructions"])
    presets.sort(key=lambda loop: -loop["wide stores"])
    for (name, (stored, most)), loop in zip(ADAMW_LOOPS.items(), presets, strict=True):
        assert loop["wide stores"] >= stored, (name, loop)
        assert loop["wide loads"] >= stored, (name, loop)
        assert loop["instructions"] <= most, (name, loop)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.xdist_group("kernel_report")
def test_the_library_for_one_architecture_is_small(
    compiled: tuple[list[Kernel], dict[str, int]],
) -> None:
    rest = kernel_report.size_without_kernels()
    if rest is None:
        pytest.skip("no built library in the tree, or no readelf")
    total = rest + sum(compiled[1].values())
    assert 1e6 < rest < total < MOST_BYTES, compiled[1]


def test_fused_multiply_adds_are_those_of_the_layouts() -> None:
    assert fused_of("apply_kernel<AdamW>") == 13 * 48
    assert fused_of("apply_kernel<Amsgrad<AdamW>>") == 48
    assert fused_of("apply_noting_kernel<AdamW>") == 13 * 48
    assert fused_of("apply_noting_kernel<Adam>") == 48
    assert fused_of("apply_kernel<SGD>") == fused_of("update_sums_kernel<AdamW>") == 0


def test_the_report_compiles_as_the_build_does() -> None:
    build = re.search(r'NVCC_FLAGS = "(.*)"', (ROOT / "build_tools/native.py").read_text())
    assert build
    assert set(kernel_report.FLAGS) <= set(build[1].split())


def test_a_bad_kernel_is_found_out() -> None:
    good = Kernel(name="measure_kernel<2, 448>", registers=62, threads=128, asked=8)
    good.code.update({"wide loads": 3, "narrow loads": 1})
    bad = Kernel("apply_kernel<AdamW>", registers=255, stack=208, spill_stores=44, spill_loads=48)
    bad.threads, bad.fused, bad.calls = 512, 1, 1
    bad.code.update({"local": 1, "generic": 1, "clamp tests": 1})
    assert faults(good, set()) == ["3 wide loads, 19 are needed"]
    assert [fault.split()[0] for fault in faults(bad, set())] == ["48", "1", "0", *"111100"]
    assert len(faults(bad, set())) == 9
    good.name = "another"
    assert faults(good, set()) == []


PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4goodv' for 'sm_90'
ptxas info    : Function properties for _Z4goodv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 62 registers, used 1 barriers, 384 bytes smem
ptxas info    : Compiling entry function '_Z3badPf' for 'sm_90'
ptxas info    : Function properties for _Z3badPf
    200 bytes stack frame, 40 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 200 bytes cumulative stack size
ptxas info    : Function properties for _Z6helperv
    8 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
"""
PTX = """\
.entry _Z4goodv()
.maxntid 128, 1, 1
.minnctapersm 8
{
\tmad.lo.s32 \t%r1, %r2, %r3, %r4;
\tmul.rn.f32 \t%f1, %f2, %f3;
}
\t// .globl _Z3badPf
.visible .entry _Z3badPf(
\t.param .u64 _Z3badPf_param_1
)
.maxntid 512
{
\t@%p1 fma.rn.f32 \t%f1, %f2, %f3, %f4;
\t{
\tcall.uni (retval0), helper, ();
\t}
}
"""
LISTING = """\
.text._Z4goodv:
.L_x_1:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_2:
        /*0010*/              @!P4 LDG.E.128 R24, desc[UR8][R32.64+0x10] ;
        /*0020*/                   LDG.E.U16.CONSTANT R24, desc[UR8][R32.64] ;
        /*0030*/              @UP0 STG.E.128 desc[UR8][R32.64], R4 ;
        /*0040*/               @P0 BRA P5, `(.L_x_2) ;
        /*0050*/               @P0 BRA `(.L_x_3) ;
.L_x_3:
        /*0060*/                   NOP;
.text._Z3badPf:
        /*0000*/                   STL [R1+0x8], R12 ;
        /*0010*/               @P0 LDL.64 R12, [R1] ;
        /*0020*/                   LD.E R4, [R2] ;
        /*0028*/              @!P0 VIMNMX.RELU R0, P1, P1, R2, 0x8, PT ;
        /*002c*/                   VIMNMX.RELU R0, R2, 0x8, PT ;
        /*002e*/                   VIMNMX3.U32 R0, R2, R3, R4, !PT ;
        /*0030*/                   BRA `(.L_x_1);
"""


def test_what_compilers_print_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    kernels = parse_ptxas(PTXAS)
    add_ptx(kernels, PTX)
    add_code(kernels, LISTING)
    good, bad = kernels["_Z4goodv"], kernels["_Z3badPf"]
    assert (good.registers, good.shared, good.stack, good.spill_stores) == (62, 384, 0, 0)
    assert (good.threads, good.asked, good.fused, good.calls) == (128, 8, 0, 0)
    loop = {"wide loads": 1, "narrow loads": 1, "wide stores": 1, "others": 1, "instructions": 4}
    assert good.loops == [loop]
    assert good.code == {**loop, "others": 4, "instructions": 7}
    assert (bad.stack, bad.spill_stores, bad.spill_loads, bad.registers) == (208, 44, 48, 255)
    assert (bad.threads, bad.asked, bad.fused, bad.calls) == (512, 1, 1, 1)
    assert (bad.code["others"], bad.code["instructions"]) == (3, 7)
    assert [bad.code[name] for name in ("local", "generic", "clamp tests")] == [2, 1, 1]
    assert not bad.loops
    good.name, bad.name = "good", "bad"
    kernel_report.show([good, bad])
    shown = capsys.readouterr().out
    assert "good\t62\t0/0\t0\t384\t8/8\t7\t1\t1\t1\t0\t0\t0\t0\n  loop" in shown
    assert "44/48" in shown


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "blocks"),
    [
        (128, 256, 0, 2),
        (129, 256, 0, 1),
        (65, 128, 384, 7),
        (32, 32, 0, 32),
        (16, 128, 48 << 10, 4),
    ],
)
def test_occupancy_of_an_h100(registers: int, threads: int, shared: int, blocks: int) -> None:
    kernel = Kernel(registers=registers, threads=threads, shared=shared)
    assert kernel.blocks() == blocks


def test_names_are_short() -> None:
    long = "void a::b::(anonymous namespace)::apply_kernel<a::Amsgrad<a::Adam> >(a::Table<8>, int)"
    assert short_name(long) == "apply_kernel<Amsgrad<Adam>>"
