"""What nvcc makes of the kernels, for sm_90: no spills, wide accesses, no fused multiply-add.

benchmarks/kernels/kernel_report.py reads it from ptxas and PTX; the tests of its parsers are below.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

import kernel_report  # noqa: E402
from kernel_code import Kernel, add_ptx, add_sass, parse_ptxas, short_name  # noqa: E402

ARCH = "90"
HOT = ("apply_kernel", "average_kernel", "copy_kernel", "measure_kernel", "moments_kernel")
STATES = {
    rule: int(states)
    for header in (ROOT / "csrc/core/rules").glob("*.h")
    for rule, states in re.findall(
        r"^struct (\w+) \{\n +static constexpr int kStates = (\d)", header.read_text(), re.MULTILINE
    )
}
# 16-byte pieces of eight elements of an array that may be float32, and of a split master's rest.
ARRAY, REST = 2, 1


def wide_accesses(name: str, two_pass: set[str]) -> tuple[int, int]:
    """The 16-byte loads and stores that a kernel's arrays take, at the least.

    `two_pass` are the rules whose states were advanced by moments_kernel: apply_kernel then needs
    no gradient and stores no state.
    """
    kind, _, rule = name.removesuffix(">").partition("<")
    if kind == "measure_kernel":  # four rows in flight of float32, float16 and bfloat16
        splits = rule.startswith("2")  # pointers for each tensor
        return 4 * (2 + 1 + 1) + (ARRAY + REST if splits else 0), 0
    if kind == "copy_kernel":
        return ARRAY + REST, ARRAY + REST
    if kind == "average_kernel":
        return 2 * (ARRAY + REST), ARRAY + REST
    if kind not in HOT:
        return 0, 0
    states = STATES[rule.split("<")[0]] * ARRAY
    gradient, master, weight = ARRAY, ARRAY + REST, ARRAY
    if kind == "moments_kernel":
        return gradient + master + states, states
    if rule in two_pass:
        return master + states, master + weight
    return gradient + master + states, master + weight + states


def faults(kernel: Kernel, two_pass: set[str]) -> list[str]:
    """What is wrong with a kernel, a line each."""
    found = []
    spilt = max(kernel.spill_stores, kernel.spill_loads)
    if spilt > 0:
        found.append(f"{spilt} bytes spill")
    if kernel.stack > 0 and spilt == 0:
        found.append(f"a stack frame of {kernel.stack} bytes")
    if kernel.ptx["local"] > 0:
        found.append(f"{kernel.ptx['local']} accesses of local memory: an array that is indexed")
    if kernel.blocks(ARCH) < kernel.asked:
        found.append(f"{kernel.blocks(ARCH)} blocks fit, {kernel.asked} are asked for")
    if kernel.ptx["fma"] > 0:
        found.append(f"{kernel.ptx['fma']} fused multiply-adds")
    if kernel.name.startswith(HOT):
        for what in ("generic", "calls"):
            if kernel.ptx[what] > 0:
                found.append(f"{kernel.ptx[what]} {what}")
    for what, needed in zip(("loads", "stores"), wide_accesses(kernel.name, two_pass), strict=True):
        if kernel.ptx[f"wide {what}"] < needed:
            found.append(f"{kernel.ptx[f'wide {what}']} wide {what}, {needed} are needed")
    return found


@pytest.mark.slow
def test_no_kernel_spills_or_is_narrow() -> None:
    if reason := kernel_report.why_unavailable():
        pytest.skip(f"the kernels are not compiled: {reason}")
    sources = sorted((ROOT / "csrc/cuda").glob("*.cu"))
    kernels = kernel_report.report(sources, ARCH)
    names = [kernel.name for kernel in kernels]
    rules = (ROOT / "csrc/core/rules.h").read_text().count("_)")
    assert sum(name.startswith("apply_kernel<") for name in names) == rules
    for hot in HOT:
        assert any(name.startswith(hot) for name in names), f"no {hot} among {names}"
    two_pass = {n[len("moments_kernel<") : -1] for n in names if n.startswith("moments_kernel<")}
    wrong = {k.name: found for k in kernels if (found := faults(k, two_pass))}
    assert not wrong, "\n".join(f"{name}: {', '.join(found)}" for name, found in wrong.items())


def test_the_report_compiles_as_the_build_does() -> None:
    build = re.search(r'NVCC_FLAGS = "(.*)"', (ROOT / "build_tools/native.py").read_text())
    assert build
    assert set(kernel_report.FLAGS) <= set(build[1].split())


PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4goodv' for 'sm_90'
ptxas info    : Function properties for _Z4goodv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 62 registers, used 1 barriers, 384 bytes smem
ptxas info    : Compile time = 136.871 ms
ptxas info    : Compiling entry function '_Z3badPf' for 'sm_90'
ptxas info    : Function properties for _Z3badPf
    200 bytes stack frame, 40 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 200 bytes cumulative stack size
ptxas info    : Function properties for _Z6helperv
    8 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
"""
PTX = """\
.version 9.0
.entry _Z4goodv()
.maxntid 128, 1, 1
.minnctapersm 8
{
\tld.global.nc.v4.u32 \t{%r1, %r2, %r3, %r4}, [%rd1];
\t@%p1 ld.global.L1::no_allocate.v4.f32 \t{%f1, %f2, %f3, %f4}, [%rd1];
\tld.global.v2.u32 \t{%r1, %r2}, [%rd1];
\tld.global.v2.f64 \t{%fd1, %fd2}, [%rd1];
\tld.shared.f64 \t%fd1, [%rd2];
\t@!%p1 st.global.v4.b32 \t[%rd1], {%r1, %r2, %r3, %r4};
\tst.global.u8 \t[%rd1], %rs1;
\tmad.lo.s32 \t%r1, %r2, %r3, %r4;
\tmul.rn.f32 \t%f1, %f2, %f3;
}
\t// .globl _Z3badPf
.visible .entry _Z3badPf(
\t.param .align 8 .b8 _Z3badPf_param_0[20],
\t.param .u64 _Z3badPf_param_1,
\t.param .u8 _Z3badPf_param_2,
\t.param .u32 _Z3badPf_param_3
)
.maxntid 512
{
\t.local .align 16 .b8 \t__local_depot0[192];
\tst.local.v4.u32 \t[%rd1], {%r1, %r2, %r3, %r4};
\tld.u32 \t%r1, [%rd1];
\tfma.rn.f32 \t%f1, %f2, %f3, %f4;
\t{
\tcall.uni (retval0), helper, ();
\t}
\tadd.rn.f64 \t%fd1, %fd2, %fd3;
}
"""
SASS = """\
\t\tFunction : _Z4goodv
        /*0000*/                   LDC R1, c[0x0][0x28] ;  /* 0x00000a00ff017b82 */
        /*0010*/              @!P4 LDG.E.128 R24, desc[UR8][R32.64+0x10] ;  /* 0x0 */
        /*0020*/                   LDG.E.U16.CONSTANT R24, desc[UR8][R32.64] ;  /* 0x0 */
        /*0030*/              @UP0 STG.E.128 desc[UR8][R32.64], R4 ;  /* 0x0 */
        /*0040*/                   FFMA R1, R2, R3, R4 ;  /* 0x0 */
\t\tFunction : _Z3badPf
        /*0000*/                   STL [R1+0x8], R12 ;  /* 0x0 */
        /*0010*/               @P0 LDL.64 R12, [R1] ;  /* 0x0 */
        /*0020*/                   DFMA R4, R2, R6, R8 ;  /* 0x0 */
        /*0030*/                   CALL.REL.NOINC 0x14fb0 ;  /* 0x0 */
"""


def test_parsers_read_what_compilers_print() -> None:
    kernels = parse_ptxas(PTXAS)
    add_ptx(kernels, PTX)
    add_sass(kernels, SASS)
    good, bad = kernels["_Z4goodv"], kernels["_Z3badPf"]
    assert (good.registers, good.shared, good.stack, good.spill_stores) == (62, 384, 0, 0)
    assert (good.threads, good.asked, good.arguments) == (128, 8, 0)
    assert good.ptx == {"wide loads": 3, "narrow loads": 1, "wide stores": 1, "narrow stores": 1}
    assert (bad.stack, bad.spill_stores, bad.spill_loads, bad.registers) == (208, 44, 48, 255)
    assert (bad.threads, bad.asked, bad.arguments) == (512, 1, 20 + 4 + 8 + 1 + 3 + 4)
    assert bad.ptx == {"local": 1, "generic": 1, "fma": 1, "calls": 1, "double": 1}
    assert good.sass == {"wide loads": 1, "narrow loads": 1, "wide stores": 1, "fma": 1}
    assert bad.sass == {"local": 2, "fma": 1, "double": 1, "calls": 1}


def test_a_bad_kernel_is_found_out() -> None:
    kernels = parse_ptxas(PTXAS)
    add_ptx(kernels, PTX)
    good, bad = kernels.values()
    assert faults(good, set()) == []
    good.name, bad.name = "measure_kernel<2, 448>", "apply_kernel<AdamW>"
    assert faults(good, set()) == ["3 wide loads, 19 are needed"]
    assert [fault.split()[0] for fault in faults(bad, set())] == ["48", "1", "0", *"11100"]
    assert len(faults(bad, set())) == 8
    with pytest.raises(ValueError, match="_Z3badPf"):
        add_ptx({"_Z4goodv": Kernel()}, PTX)
    with pytest.raises(ValueError, match="_Z3badPf"):
        add_sass({"_Z4goodv": Kernel()}, SASS)


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "blocks"),
    [
        (128, 256, 0, 2),
        (129, 256, 0, 1),
        (64, 128, 384, 8),
        (65, 128, 384, 7),
        (32, 32, 0, 32),
        (32, 1024, 0, 2),
        (16, 128, 48 * 1024, 4),
    ],
)
def test_occupancy_of_an_h100(registers: int, threads: int, shared: int, blocks: int) -> None:
    kernel = Kernel(registers=registers, threads=threads, shared=shared)
    assert kernel.blocks("90") == blocks


def test_names_are_short() -> None:
    long = "void a::b::(anonymous namespace)::apply_kernel<a::Amsgrad<a::Adam> >(a::Table<8>, int)"
    assert short_name(long) == "apply_kernel<Amsgrad<Adam>>"


@pytest.mark.parametrize("with_rich", [True, False])
def test_tables_show_every_kernel(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, with_rich: bool
) -> None:
    if not with_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    kernels = parse_ptxas(PTXAS)
    add_ptx(kernels, PTX)
    for name, kernel in kernels.items():
        kernel.name = name
    kernel_report.show(list(kernels.values()), ARCH)
    shown = capsys.readouterr().out
    for text in ("_Z4goodv", "_Z3badPf", "44/48", "8/8", "wide loads"):
        assert text in shown


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="arch: '91' is not known here"):
        kernel_report.report([], "91")
