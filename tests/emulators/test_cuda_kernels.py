"""The library's CUDA kernels, run on the CPU under sanitizers: equal to the CPU loops bit for bit.

They run on the emulator in cuda_on_cpu, so this needs no GPU and no nvcc.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda_on_cpu.build import build, run, why_unavailable
from made import KEPT
from tiers import full

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.xdist_group("cuda_kernels"),
]

HERE = Path(__file__).resolve().parent

CSRC = HERE.parents[1] / "csrc"
SOURCES = [
    HERE / "cuda_kernels/compare.cpp",
    CSRC / "cuda/apply.cu",  # takes longest to compile, so it begins early
    *sorted(set(CSRC.glob("cuda/*.cu")) - {CSRC / "cuda/apply.cu"}),
    CSRC / "core/rules.cpp",
    *sorted(CSRC.glob("cpu/*.cpp")),
]


def program(variant: str, *defines: str) -> Path:
    """The comparing program in a variant."""
    if reason := why_unavailable(variant):
        pytest.skip(f"no {variant} build of the CUDA kernels: {reason}")
    out = KEPT / "-".join(["cuda_kernels", *defines])
    return build(SOURCES, out, variant, [CSRC], defines)


# "full" has every pair of formats under every rule, "quick" fewer pairs for each rule, all of them
# among the rules.
@pytest.mark.parametrize(
    ("variant", "order", "size"),
    [
        ("plain", "forward", "quick"),
        full(("plain", "forward", "full")),
        full(("plain", "reverse", "quick")),
        full(("plain", "7", "quick")),
        full(("asan", "forward", "lists")),
        full(("tsan", "forward", "lists")),  # finds the data races
    ],
)
def test_cuda_kernels_equal_the_cpu_loops(variant: str, order: str, size: str) -> None:
    expect_equal(program(variant), variant, size, order)


@pytest.mark.full
def test_they_do_with_the_arguments_of_older_cuda() -> None:
    expect_equal(program("plain", "CUDA_ON_CPU_ARGUMENTS=4096"), "plain", "quick", "forward")


@pytest.mark.full
@pytest.mark.parametrize("variant", ["plain", "asan", "tsan"])
def test_a_rule_is_made_once_for_a_group_and_a_clock(variant: str) -> None:
    if reason := why_unavailable(variant):
        pytest.skip(f"no {variant} build of the CUDA kernels: {reason}")
    taken = {SOURCES[0], CSRC / "cuda/decide.cu"}  # made_once.cpp includes the second
    sources = [HERE / "cuda_kernels/made_once.cpp", *(s for s in SOURCES if s not in taken)]
    expect_equal(build(sources, KEPT / "made_once", variant, [CSRC]), variant, "", "forward")


def expect_equal(built: Path, variant: str, size: str, order: str) -> None:
    done = run(built, variant, size, order=order)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout
    assert done.stdout.splitlines()[-1] == "all equal"
