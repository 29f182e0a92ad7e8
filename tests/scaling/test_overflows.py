"""The watch over overflows: after which steps it warns, and what it says."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest

from amp_mp.scaling import Backoff, ScalePolicy, Static, Tolerance
from amp_mp.scaling.overflows import OverflowWatch


def warned_at(step: Callable[[bool], None], overflows: str) -> dict[int, str]:
    """The warnings by step, from 1. overflows: a character per step, "x" where it overflows."""
    found = {}
    for number, each in enumerate(overflows, 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(each == "x")
        for warning in caught:
            found[number] = str(warning.message)
    return found


def updates(policy: ScalePolicy, overflows: str) -> dict[int, str]:
    watch = OverflowWatch()
    return warned_at(lambda bad: watch.update(policy, bad, 1.0, "at scale {:g}".format), overflows)


@pytest.mark.parametrize(
    ("policy", "overflows", "expected"),
    [
        # Never falls: told at the fifth overflow of each streak, and at the fortieth.
        (Static(8.0), "x" * 4 + "." + "x" * 41, [10, 45]),
        # 4, 2, 1 and then no further: steps 3 to 7 are the first five at 1.
        (Backoff(1.0, 4.0), "x" * 12, [7]),
        (Backoff(1.0, 4.0), "." + "xxxx." * 20, []),
        # 50 halvings above its floor.
        (Backoff(1.0, 2.0**50), "x" * 45, [40]),
        # Falls where all steps since its last change overflowed, so never after a clean first one.
        (Tolerance(2.0**50, tolerance=1.0), "." + "x" * 9, [6]),
    ],
)
def test_where_no_scale_can_end_the_overflows(
    policy: ScalePolicy, overflows: str, expected: list[int]
) -> None:
    assert list(updates(policy, overflows)) == expected


def test_what_is_said_of_a_scale_that_cannot_fall() -> None:
    (message,) = updates(Backoff(1.0, 4.0), ".." + "x" * 8).values()
    assert "in each of the last 7 steps, since step 3" in message
    assert "the loss scale is 1, which cannot fall further: no scale can cure that" in message
    assert message.endswith("at scale 1")
    (message,) = updates(Backoff(1.0, 2.0**50), "x" * 40).values()
    assert "since step 1, and the loss scale is 1024: no scale can cure that" in message
    assert message.endswith("at scale 2048")


def test_skipped_steps_are_told_once_per_streak() -> None:
    watch = OverflowWatch()

    def step(bad: bool) -> None:
        watch.count(bad)
        watch.warn_of_skips("AdamW", lambda: "weight")

    found = warned_at(step, "x" * 24 + "." + "x" * 60 + "." + "x" * 25)
    assert list(found) == [50, 111]
    assert found[50].startswith("amp_mp: AdamW has skipped 25 steps in a row, since step 26: ")
    assert found[111].startswith("amp_mp: AdamW has skipped 25 steps in a row, since step 87: ")
    assert found[50].endswith("weight")
