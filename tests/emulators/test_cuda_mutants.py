"""The tests of the CUDA kernels notice mistakes: each mutant has one, and has to fail.

Another table in a file of cuda_mutants is all that another mutant takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from cuda_on_cpu.mutate import Original, build_mutant, build_original, cuda_mutant
from made import KEPT
from mutants import read_mutants
from test_cuda_kernels import CSRC, SOURCES, run, why_unavailable

pytestmark = [
    *(pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(1200)),
    pytest.mark.xdist_group("cuda_mutants"),
]

RULES = ("AdamW", "LAMB", "Muon")  # those with kernels of their own, and every kind of list
MUTANTS = read_mutants(Path(__file__).with_name("cuda_mutants"), cuda_mutant)


@pytest.fixture(scope="module")
def original() -> Original:
    """The program without a mistake, in the variant that compiles fastest."""
    if reason := why_unavailable("plain"):
        pytest.skip(f"no build of the CUDA kernels: {reason}")
    return build_original(SOURCES, CSRC, RULES, KEPT / "cuda_mutants")


@pytest.fixture(scope="module")
def programs(original: Original) -> Iterator[dict[str, Future[Path]]]:
    """The program of each mutant; two are compiled while others run."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {
            name: pool.submit(build_mutant, mutant, original, name)
            for name, mutant in MUTANTS.items()
            if not why_unavailable(mutant.variant)
        }
        pool.shutdown(cancel_futures=True)


def test_without_a_mistake_all_is_equal(original: Original) -> None:
    done = run(original.program, "plain", "quick")
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout


@pytest.mark.parametrize("name", MUTANTS)
def test_mistake_is_noticed(programs: dict[str, Future[Path]], name: str) -> None:
    mutant = MUTANTS[name]
    if reason := why_unavailable(mutant.variant):
        pytest.skip(reason)
    done = run(programs[name].result(), mutant.variant, "quick", mutant.says)
    output = done.stdout + done.stderr
    assert done.returncode != 0, f"nobody noticed: {name}\n{output[-2000:]}"
    assert mutant.says in output, output[-4000:]
