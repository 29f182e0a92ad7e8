"""Choosing cases for `make test`: any two values of two parameters meet in one of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from pretend_gpu.suite import DELAYED, FILES, ROOT
from tiers import full, in_turn, paired, pairs, tiered

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
