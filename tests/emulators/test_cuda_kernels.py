"""The library's CUDA kernels, run on the CPU under sanitizers: equal to the CPU loops bit for bit.

They run on the emulator in cuda_on_cpu, so this needs no GPU and no nvcc.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from cuda_on_cpu.build import build, run, why_unavailable

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cuda_kernels")]

HERE = Path(__file__).resolve().parent

CSRC = HERE.parents[1] / "csrc"
SOURCES = [
    HERE / "cuda_kernels/compare.cpp",
    CSRC / "cuda/apply.cu",  # takes longest to compile, so it begins early
    CSRC / "cpu/loops.cpp",
    *sorted(set(CSRC.glob("cuda/*.cu")) - {CSRC / "cuda/apply.cu"}),
    CSRC / "cpu/passes.cpp",
    CSRC / "cpu/select.cpp",
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The comparing program in a variant and for a limit of kernel arguments, built once."""
    folder = tmp_path_factory.mktemp("cuda_kernels")

    @functools.cache
    def built(variant: str, limit: int = 32764) -> Path:
        reason = why_unavailable(variant)
        if reason:
            pytest.skip(f"no {variant} build of the CUDA kernels: {reason}")
        defines = ["AMP_MP_ISA=baseline", f"CUDA_ON_CPU_ARGUMENTS={limit}"]
        return build(SOURCES, folder / str(limit), variant, [CSRC], defines)

    return built


# Every pair of formats under every rule once; the orders in which blocks and threads run, and the
# sanitizers, over fewer pairs a rule, all of them among the rules.
@pytest.mark.parametrize(
    ("variant", "order", "size"),
    [
        ("plain", "forward", "full"),
        ("plain", "reverse", "quick"),
        ("plain", "7", "quick"),
        ("asan", "forward", "lists"),
        ("tsan", "forward", "lists"),  # finds the data races
    ],
)
def test_cuda_kernels_equal_the_cpu_loops(
    program: Callable[..., Path], variant: str, order: str, size: str
) -> None:
    expect_equal(program(variant), variant, size, order)


def test_they_do_with_the_arguments_of_older_cuda(program: Callable[..., Path]) -> None:
    expect_equal(program("plain", 4096), "plain", "quick", "forward")


def expect_equal(built: Path, variant: str, size: str, order: str) -> None:
    done = run(built, variant, size, order=order)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout
    assert done.stdout.splitlines()[-1] == "all equal"
