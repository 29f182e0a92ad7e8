"""Which cases run in `make test`, and which in `make test-all` alone: those are marked `full`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import pytest

Allowed = Callable[..., bool]  # of a case's values, whether there is such a case


def anything(*case: Any) -> bool:
    return True


def pairs(*parameters: Iterable[Any], allowed: Allowed = anything) -> list[tuple[Any, ...]]:
    """Combinations in which any two values of two parameters meet; always the same ones.

    Many fewer than the product of three or more parameters. In the product's order. The package
    allpairspy does the same, and would be one more dependency of the tests for these 20 lines.
    """
    values = [list(p) for p in parameters]
    if len(values) == 1:
        return [(v,) for v in values[0]]
    combinations = [
        numbers
        for numbers in itertools.product(*(range(len(v)) for v in values))
        if allowed(*(v[i] for v, i in zip(values, numbers, strict=True)))
    ]
    sides = list(itertools.combinations(range(len(values)), 2))
    missing = {pair for c in combinations for pair in _pairs_of(c, sides)}
    chosen = []
    while missing:  # those that show the most pairs first
        for wanted in range(len(sides), 0, -1):
            found = [c for c in combinations if len(missing & _pairs_of(c, sides)) >= wanted]
            for combination in found:
                shown = missing & _pairs_of(combination, sides)
                if len(shown) >= wanted:
                    chosen.append(combination)
                    missing -= shown
    return [tuple(v[i] for v, i in zip(values, c, strict=True)) for c in sorted(chosen)]


def _pairs_of(combination: tuple[int, ...], sides: list[tuple[int, int]]) -> set[Any]:
    return {(a, combination[a], b, combination[b]) for a, b in sides}


def paired(*parameters: Iterable[Any], allowed: Allowed = anything) -> list[Any]:
    """For parametrize: all combinations; those that are not among `pairs` are marked `full`."""
    parameters = tuple(list(p) for p in parameters)
    everything = [case for case in itertools.product(*parameters) if allowed(*case)]
    return tiered(everything, pairs(*parameters, allowed=allowed))


def in_turn(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """For parametrize: all pairs; each first value with one second value, the others `full`."""
    first, second = list(first), list(second)
    chosen = [(a, second[n % len(second)]) for n, a in enumerate(first)]
    return tiered(itertools.product(first, second), chosen)


def tiered(everything: Iterable[Any], chosen: Container[Any]) -> list[Any]:
    """For parametrize: all cases; those that are not chosen are marked `full`."""
    return [case if case in chosen else full(case) for case in everything]


def full(case: Any) -> Any:
    """A case of `make test-all` alone. A tuple is the values of several parameters."""
    values: Sequence[Any] = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.full)
