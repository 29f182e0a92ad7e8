"""What `make test` prints at its end: the slowest tests and files, and why tests were skipped."""

from __future__ import annotations

from typing import Any

import pytest
from run_summary import SHOWN, RunSummary


def report(test: str, when: Any, seconds: float, skipped: str = "") -> pytest.TestReport:
    outcome: Any = "skipped" if skipped else "passed"
    longrepr = ("tests/a.py", 1, f"Skipped: {skipped}") if skipped else None
    return pytest.TestReport(test, ("", 0, ""), {}, outcome, longrepr, when, duration=seconds)


def told(files: int) -> RunSummary:
    """Of files with two cases of a test each; those of file n take n and 2 n seconds in all."""
    summary = RunSummary()
    for n in range(files):
        for case, seconds in (("a", n), ("b", 2 * n)):
            for when, part in (("setup", 0.25), ("call", 0.5), ("teardown", 0.25)):
                name = f"tests/room/test_{n}.py::test_it[{case}]"
                summary.pytest_runtest_logreport(report(name, when, part * seconds))
    return summary


def test_tests_and_files_are_shown_with_the_sums_of_their_seconds() -> None:
    lines = told(40).slowest()
    assert lines[:3] == [
        "seconds  slowest tests",
        "  78.00  tests/room/test_39.py::test_it[b]",
        "  76.00  tests/room/test_38.py::test_it[b]",
    ]
    assert lines[SHOWN + 1] == "seconds  slowest files"
    first, last = lines[SHOWN + 2].split(), lines[-1].split()
    assert first == ["117.00", "room/test_39.py", "93.00", "room/test_31.py"]
    assert last == ["96.00", "room/test_32.py"]
    assert len(lines) == 25
    assert len({line.index("room") for line in lines[SHOWN + 2 :]}) == 1


def test_a_run_of_few_files_shows_none() -> None:
    assert told(SHOWN).slowest() == []
    assert told(SHOWN + 1).slowest() != []


def test_skipped_tests_are_counted_by_reason() -> None:
    summary = RunSummary()
    assert summary.why_skipped() == []
    for n, reason in enumerate(["no GPU", "no nvcc", "no GPU", "a long story " * 9]):
        summary.pytest_runtest_logreport(report(f"tests/a.py::{n}", "setup", 0.0, reason))
    (line,) = summary.why_skipped()
    assert line.startswith("skipped: 2 no GPU, 1 no nvcc, 1 a long story a long")
    assert line.endswith("...")
    for n in range(30):
        summary.pytest_runtest_logreport(report(f"b.py::{n}", "call", 0.0, f"reason {n} " * 5))
    assert len(summary.why_skipped()) == 3
    assert max(map(len, summary.why_skipped())) <= 100
