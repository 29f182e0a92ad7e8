"""The CUDA-on-CPU shim itself: each fault is noticed where it can be, and captures are CUDA's.

That correct kernels pass in any order test_cuda_kernels.py shows, by those of the library.
"""

import functools
from pathlib import Path

import pytest
from cuda_on_cpu import build as cuda_on_cpu
from made import KEPT

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.xdist_group("cuda_on_cpu")]

# What a variant says about a fault; None where it cannot notice. Plain and ASan builds see wrong
# values and what the shim itself checks, ASan also sees overflows, TSan races whatever the values.
VARIANTS = ("plain", "asan", "tsan")
RACE = "ThreadSanitizer: data race"
NOTICED = {
    "missing_barrier": ("wrong: element", "wrong: element", RACE),
    "divergent_barrier": ("threads of a block wait at different places",) * 3,
    "unreached_barrier": ("selftest_faults.cu:",) * 3,
    "unequal_shuffles": ("is stuck",) * 3,
    "shuffle_beyond_warp": ("a shuffle from a lane that does not exist",) * 3,
    "off_by_one_read": (None, "heap-buffer-overflow", None),
    "shared_overflow": (None, "global-buffer-overflow", None),
    "race_between_blocks": (None, None, RACE),
    "race_between_threads": (None, None, RACE),
    "reused_shared": (None, None, RACE),
    "shuffle_as_fence": (None, None, RACE),
}


@functools.cache
def program(variant: str) -> Path:
    """The self-test in a variant; skips where g++ cannot build it."""
    if reason := cuda_on_cpu.why_unavailable(variant):
        pytest.skip(reason)
    sources = [cuda_on_cpu.HERE / f"{part}.cu" for part in ("selftest", "selftest_faults")]
    return cuda_on_cpu.build(sources, KEPT / "selftest", variant, include=[])


@pytest.mark.parametrize("variant", VARIANTS)
def test_captures_and_refused_launches(variant: str) -> None:
    result = cuda_on_cpu.run(program(variant), variant)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("fault", NOTICED)
def test_fault_is_noticed(fault: str, variant: str, order: str) -> None:
    message = NOTICED[fault][VARIANTS.index(variant)]
    result = cuda_on_cpu.run(program(variant), variant, fault, order=order)
    output = result.stdout + result.stderr
    if message is None:
        assert result.returncode == 0, output
    else:
        assert result.returncode not in (0, 2), output
        assert message in output


def test_unknown_order_is_refused() -> None:
    result = cuda_on_cpu.run(program("plain"), "plain", order="backward")
    assert result.returncode != 0
    assert "not backward" in result.stderr


def test_shared_memory_without_red_zones_is_refused(tmp_path: Path) -> None:
    """ASan leaves out statics of inline functions: the build says so instead of passing."""
    if reason := cuda_on_cpu.why_unavailable("asan"):
        pytest.skip(reason)
    source = tmp_path / "shared.cu"
    source.write_text(
        '#include "cuda_on_cpu.h"\n'
        "inline int* scratch() { __shared__ int unguarded[4]; return unguarded; }\n"
        "int main() { return scratch()[0]; }\n"
    )
    with pytest.raises(RuntimeError, match=r"unguarded.*anonymous namespace"):
        cuda_on_cpu.build([source], tmp_path, "asan", include=[])
