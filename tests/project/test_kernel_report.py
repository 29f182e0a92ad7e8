"""What nvcc makes of the kernels, for sm_90: no spills, wide accesses, few fused multiply-adds.

benchmarks/kernels/kernel_report.py reads it from ptxas and PTX.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import kernel_report
import pytest
from cuda_on_cpu.build import build, why_unavailable
from kernel_code import Kernel, short_name
from kernel_path import ARCH

ROOT = Path(__file__).resolve().parents[2]
FIRST_HALVES = ("moments_kernel", "directions_kernel")
HOT = ("apply_kernel", "average_kernel", "copy_kernel", "measure_kernel", *FIRST_HALVES)
STATES = {
    rule: int(states)
    for header in (ROOT / "csrc/core/rules").glob("*.h")
    for rule, states in re.findall(
        r"^struct (\w+) \{\n +static constexpr int kStates = (\d)", header.read_text(), re.MULTILINE
    )
}
# 16-byte pieces of eight elements of an array that may be float32, and of a split master's rest.
ARRAY, REST = 2, 1
DIRECTION = 1  # always bfloat16
PACK_FUSED = 8 * 6  # fused multiply-adds of a root and a quotient, for eight elements
LAYOUT_LOOPS = 2  # for each layout, one of whole packs and one of any; without a layout one of any
# For any one architecture. A wheel for several has as many times the machine code.
MOST_BYTES = 8e6


def wide_accesses(name: str, two_pass: set[str]) -> tuple[int, int]:
    """The 16-byte loads and stores that a kernel's arrays take, at the least.

    `two_pass` are the rules whose states were advanced by another kernel: apply_kernel then needs
    no gradient and stores no state. Muon's, with directions_kernel, reads the update alone.
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
    if kind == "directions_kernel":
        return gradient + ARRAY, ARRAY + DIRECTION
    if rule == "Muon":
        return DIRECTION + master, master + weight
    if rule in two_pass:
        return master + states, master + weight
    return gradient + master + states, master + weight + states


def fused_of(layouts: Mapping[str, tuple[int, bool]], name: str) -> int:
    """How many fused multiply-adds a kernel has to have.

    Those of cuda/quotient.h, in each loop of an apply kernel whose rule divides by a root. nvcc's
    own square roots and divisions do not show theirs in PTX; any other is one that nvcc must not
    make of a product and a sum.
    """
    kind, _, rule = name.removesuffix(">").partition("<")
    compiled, divides = layouts.get(rule, (0, False))
    return PACK_FUSED * (LAYOUT_LOOPS * compiled + 1) if kind == "apply_kernel" and divides else 0


def faults(kernel: Kernel, two_pass: set[str], fused: int = 0) -> list[str]:
    """What is wrong with a kernel, a line each. `fused`: its fused multiply-adds, as fused_of."""
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
    if kernel.ptx["fma"] != fused:
        found.append(f"{kernel.ptx['fma']} fused multiply-adds, {fused} are wanted")
    if kernel.name.startswith(HOT):
        for what in ("generic", "calls"):
            if kernel.ptx[what] > 0:
                found.append(f"{kernel.ptx[what]} {what}")
    for what, needed in zip(("loads", "stores"), wide_accesses(kernel.name, two_pass), strict=True):
        if kernel.ptx[f"wide {what}"] < needed:
            found.append(f"{kernel.ptx[f'wide {what}']} wide {what}, {needed} are needed")
    return found


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, bool]]:
    """For how many layouts each rule is compiled, and whether it divides by a root."""
    if reason := why_unavailable("plain"):
        pytest.skip(f"layouts are not counted: {reason}")
    source = Path(__file__).resolve().parent / "kernels/layouts.cpp"
    program = build([source], tmp_path_factory.mktemp("layouts"), "plain", [ROOT / "csrc"])
    told = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    rows = [line.split("\t") for line in told.splitlines()]
    return {short_name(name): (int(count), divides == "1") for name, count, divides in rows}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.xdist_group("kernel_report")
def test_no_kernel_spills_or_is_narrow(
    compiled: kernel_report.Report, layouts: dict[str, tuple[int, bool]]
) -> None:
    kernels = compiled.kernels
    names = [kernel.name for kernel in kernels]
    rules = (ROOT / "csrc/core/rules.h").read_text().count("_)")
    assert {name for name in names if name.startswith("apply_kernel<")} == {
        f"apply_kernel<{rule}>" for rule in layouts
    }
    assert len(layouts) == rules
    for hot in HOT:
        assert any(name.startswith(hot) for name in names), f"no {hot} among {names}"
    two_pass = {n.partition("<")[2][:-1] for n in names if n.startswith(FIRST_HALVES)}
    found = {k.name: faults(k, two_pass, fused_of(layouts, k.name)) for k in kernels}
    wrong = {name: lines for name, lines in found.items() if lines}
    assert not wrong, "\n".join(f"{name}: {', '.join(lines)}" for name, lines in wrong.items())


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.xdist_group("kernel_report")
def test_the_library_for_one_architecture_is_small(compiled: kernel_report.Report) -> None:
    rest = kernel_report.size_without_kernels()
    if rest is None:
        pytest.skip("no built library in the tree, or no readelf")
    total = rest + sum(compiled.cubins.values())
    assert 1e6 < rest < total < MOST_BYTES, compiled.cubins


def test_fused_multiply_adds_are_those_of_the_layouts() -> None:
    layouts = {"AdamW": (5, True), "Amsgrad<AdamW>": (0, True), "SGD": (4, False)}
    assert fused_of(layouts, "apply_kernel<AdamW>") == 11 * 48
    assert fused_of(layouts, "apply_kernel<Amsgrad<AdamW>>") == 48
    assert fused_of(layouts, "apply_kernel<SGD>") == 0
    assert fused_of(layouts, "moments_kernel<AdamW>") == 0
    kernel = Kernel("copy", registers=32)
    kernel.ptx["fma"] = 47
    assert faults(kernel, set(), 48) == ["47 fused multiply-adds, 48 are wanted"]


def test_the_report_compiles_as_the_build_does() -> None:
    build = re.search(r'NVCC_FLAGS = "(.*)"', (ROOT / "build_tools/native.py").read_text())
    assert build
    assert set(kernel_report.FLAGS) <= set(build[1].split())


def test_a_bad_kernel_is_found_out() -> None:
    good = Kernel(name="measure_kernel<2, 448>", registers=62, threads=128, asked=8)
    good.ptx.update({"wide loads": 3, "narrow loads": 1})
    bad = Kernel("apply_kernel<AdamW>", registers=255, stack=208, spill_stores=44, spill_loads=48)
    bad.threads = 512
    bad.ptx.update({"local": 1, "generic": 1, "fma": 1, "calls": 1, "double": 1})
    assert faults(good, set()) == ["3 wide loads, 19 are needed"]
    assert [fault.split()[0] for fault in faults(bad, set())] == ["48", "1", "0", *"11100"]
    assert len(faults(bad, set())) == 8
    good.name = "another"
    assert faults(good, set()) == []
