"""The parsers of what ptxas, PTX and machine code say of a kernel, and the tables made of it."""

from __future__ import annotations

import sys

import kernel_report
import kernel_tables
import pytest
from kernel_code import Kernel, add_code, add_ptx, parse_ptxas, short_name
from kernel_path import Measured, Path
from sass import parse

ARCH = "90"

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
SASS = {
    "_Z4goodv": """\
LDC R1, c[0x0][0x28]
@!P4 LDG.E.128 R24, desc[UR8][R32.64+0x10]
LDG.E.U16.CONSTANT R24, desc[UR8][R32.64]
@UP0 STG.E.128 desc[UR8][R32.64], R4
FFMA R1, R2, R3, R4""",
    "_Z3badPf": """\
STL [R1+0x8], R12
@P0 LDL.64 R12, [R1]
DFMA R4, R2, R6, R8
CALL.REL.NOINC `(.L_x_1)""",
}


def listing() -> str:
    """SASS as nvdisasm prints it."""
    lines = []
    for name, code in SASS.items():
        lines.append(f".text.{name}:")
        for n, text in enumerate(code.splitlines()):
            lines.append(f"        /*{16 * n:04x}*/    {text} ;  /* 0x0000000000000000 */")
            lines.append("        /* 0x000fe20000000800 */")
    return "\n".join(lines)


def test_parsers_read_what_compilers_print() -> None:
    kernels = parse_ptxas(PTXAS)
    add_ptx(kernels, PTX)
    add_code(kernels, parse(listing()))
    good, bad = kernels["_Z4goodv"], kernels["_Z3badPf"]
    assert (good.registers, good.shared, good.stack, good.spill_stores) == (62, 384, 0, 0)
    assert (good.threads, good.asked, good.arguments) == (128, 8, 0)
    assert good.ptx == {"wide loads": 3, "narrow loads": 1, "wide stores": 1, "narrow stores": 1}
    assert (bad.stack, bad.spill_stores, bad.spill_loads, bad.registers) == (208, 44, 48, 255)
    assert (bad.threads, bad.asked, bad.arguments) == (512, 1, 20 + 4 + 8 + 1 + 3 + 4)
    assert bad.ptx == {"local": 1, "generic": 1, "fma": 1, "calls": 1, "double": 1}
    assert good.sass == {"wide loads": 1, "narrow loads": 1, "wide stores": 1, "fma": 1}
    assert bad.sass == {"local": 2, "fma": 1, "double": 1, "calls": 1}
    with pytest.raises(ValueError, match="_Z3badPf"):
        add_ptx({"_Z4goodv": Kernel()}, PTX)
    with pytest.raises(ValueError, match="_Z3badPf"):
        add_code({"_Z4goodv": Kernel()}, parse(listing()))


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
    kernel_tables.show(list(kernels.values()), ARCH)
    shown = capsys.readouterr().out
    for text in ("_Z4goodv", "_Z3badPf", "44/48", "8/8", "wide loads"):
        assert text in shown


def test_paths_show_guesses_and_wrong_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(700.0, 1080, 1.0, 2400.0, 14.125, 0, [])
    odd = Path(411.0, 634, 3.0, 48790.0, 26.0, 5, ["0x0010: EXIT: its guard is not known"])
    kernel = Kernel("apply_kernel<AdamW>", registers=128, threads=128)
    kernel_tables.show_paths(
        [Measured(kernel, "AdamW", "tiny", 0, path), Measured(kernel, "AdamW", "exact", 1, odd)],
        ARCH,
    )
    shown = capsys.readouterr().out
    # 26 bytes at 3 TB/s; 411 / 3.2 and 48790 / 16 cycles for 256 elements on 132 times 1.7 GHz
    for text in ("one element off", "14.125", "100%", "8.7/2.2/53.1", "16%"):
        assert text in shown
    assert "guessed in AdamW, exact: 0x0010: EXIT: its guard is not known" in shown
    assert "WRONG: AdamW, exact: 5 bytes" in shown


def test_the_library_is_the_sum_of_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    kernel_tables.show_library({"a.cu": 10.04, "b.cu": 2.0}, {"a.cu": 2_000_000, "b.cu": 1}, 10**6)
    shown = capsys.readouterr().out
    for text in ("10.0", "12.0", "2.00", "3.00"):
        assert text in shown


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="arch: '91' is not known here"):
        kernel_report.report([], "91")
