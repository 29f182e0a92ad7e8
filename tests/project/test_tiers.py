"""Choosing cases for `make test`: any two values of two parameters meet in one of them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from cuda_on_cpu import build as cuda_on_cpu
from pretend_gpu import build as pretend_gpu
from pretend_gpu.suite import DELAYED, FILES, ROOT
from tiers import full, in_turn, paired, pairs, tiered

import amp_mp as amp

sys.path.append(str(ROOT))

from build_tools.native import all_sets

VALUES = ("abcdefgh", range(5), (True, False, None), ["x", "y"])


def met(combinations: Iterable[tuple[Any, ...]]) -> set[Any]:
    return {
        (a, left, b, right)
        for combination in combinations
        for (a, left), (b, right) in itertools.combinations(enumerate(combination), 2)
    }


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_two_values_meet(count: int) -> None:
    chosen, everything = pairs(*VALUES[:count]), list(itertools.product(*VALUES[:count]))
    assert set(chosen) <= set(everything)
    assert met(chosen) == met(everything)
    assert chosen == pairs(*VALUES[:count])


def test_few_combinations_are_enough() -> None:
    assert 40 <= len(pairs(*VALUES)) <= 50
    assert 9 <= len(pairs(range(3), range(3), range(3), range(3))) <= 15


def test_one_parameter_keeps_all_its_values() -> None:
    assert pairs("ab") == [("a",), ("b",)]


def test_what_is_not_chosen_is_marked() -> None:
    cases = paired("ab", "cd", "ef")
    assert len(cases) == 8
    assert [case for case in cases if type(case) is tuple] == pairs("ab", "cd", "ef")
    assert tiered([1, 2], [2]) == [full(1), 2]
    assert full((1, "a")) == pytest.param(1, "a", marks=pytest.mark.full)


def test_each_value_meets_one_in_turn() -> None:
    cases = in_turn("abc", (1, 2))
    assert [case for case in cases if type(case) is tuple] == [("a", 1), ("b", 2), ("c", 1)]
    assert len(cases) == 6


def test_the_files_of_the_pretend_gpu_exist() -> None:
    assert [name for name in FILES if not (ROOT / f"tests/{name}.py").exists()] == []
    assert {*DELAYED} <= FILES.keys()


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("AMP_MP_CUDA") != "1", reason="AMP_MP_CUDA=1 asks for kernels")
def test_what_is_asked_for_is_built_and_tested() -> None:
    """.ci/run asks for kernels and for all loops: a missing tool is no reason to leave them out."""
    assert amp.build_info()["cuda"]
    assert [cuda_on_cpu.why_unavailable("plain"), pretend_gpu.why_unavailable()] == [None, None]
    command = [sys.executable, "-m", "pytest", "-n", "0", "--collect-only", "-q"]
    command += ["-m", "kernels and not full", "tests/emulators", "tests/project"]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    for name in ("equal_the_cpu_loops", "what_needs_a_gpu_pass", "the_oldest_architecture_lacks"):
        assert name in collected
    if os.environ.get("AMP_MP_LOOPS") == "all":
        library = Path(amp.__file__).parent / "native/libamp_mp_kernels.so"
        assert [isa for isa in all_sets() if isa.encode() not in library.read_bytes()] == []
