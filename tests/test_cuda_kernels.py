"""The library's CUDA kernels, run on the CPU under sanitizers: equal to the CPU loops bit for bit.

They run through the stand-in for CUDA in tests/cuda_on_cpu, so this needs no GPU and no nvcc.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "cuda_on_cpu"))

from build import build, run, why_unavailable  # noqa: E402

CSRC = HERE.parent / "csrc"
SOURCES = [
    HERE / "cuda_kernels/compare.cpp",
    CSRC / "cuda/apply.cu",  # takes longest to compile, so it begins early
    CSRC / "cpu/loops.cpp",
    *sorted(set(CSRC.glob("cuda/*.cu")) - {CSRC / "cuda/apply.cu"}),
    CSRC / "cpu/passes.cpp",
    CSRC / "cpu/select.cpp",
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The comparing program in a variant, built once."""
    folder = tmp_path_factory.mktemp("cuda_kernels")

    @functools.cache
    def built(variant: str) -> Path:
        reason = why_unavailable(variant)
        if reason:
            pytest.skip(f"no {variant} build of the CUDA kernels: {reason}")
        return build(SOURCES, folder, variant, [CSRC], ["AMP_MP_ISA=baseline"])

    return built


# Every pair of formats under every rule once; the orders in which blocks and threads run, and the
# sanitizers, over fewer pairs a rule, all of them among the rules.
@pytest.mark.parametrize(
    ("variant", "order", "size"),
    [
        ("plain", "forward", "full"),
        ("plain", "reverse", "quick"),
        ("plain", "7", "quick"),
        ("asan", "forward", "quick"),
        ("tsan", "forward", "quick"),  # finds the data races
    ],
)
def test_cuda_kernels_equal_the_cpu_loops(
    program: Callable[[str], Path], variant: str, order: str, size: str
) -> None:
    done = run(program(variant), variant, size, order=order)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout
    assert done.stdout.splitlines()[-1] == "all equal"
