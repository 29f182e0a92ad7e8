"""The end of a run: its slowest tests and files, and why tests were skipped."""

from __future__ import annotations

import textwrap
from collections import Counter
from itertools import zip_longest

import pytest

SHOWN = 15  # tests, and files
WIDTH = 100


class RunSummary:
    """A plugin of pytest that adds up what the processes report."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()  # setup, call and teardown of each test
        self.skips: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """pytest-xdist passes on the reports of its processes."""
        self.seconds[report.nodeid] += report.duration
        if report.skipped and isinstance(report.longrepr, tuple):  # else it has failed as expected
            self.skips[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in [*self.slowest(), *self.why_skipped()]:
            terminalreporter.write_line(line)

    def slowest(self) -> list[str]:
        """Two lists, of a run of so many files that it is not one's by hand."""
        files: Counter[str] = Counter()
        for test, seconds in self.seconds.items():
            files[test.partition("::")[0]] += seconds
        if len(files) <= SHOWN:
            return []
        tests = [f"{seconds:7.2f}  {test}" for test, seconds in self.seconds.most_common(SHOWN)]
        names = [
            f"{seconds:7.2f}  {file.removeprefix('tests/')}"
            for file, seconds in files.most_common(SHOWN)
        ]
        half = (SHOWN + 1) // 2
        width = max(map(len, names[:half]))
        columns = zip_longest(names[:half], names[half:], fillvalue="")
        beside = [f"{left:{width}} {right}".rstrip() for left, right in columns]
        return ["seconds  slowest tests", *tests, "seconds  slowest files", *beside]

    def why_skipped(self) -> list[str]:
        """Each reason with its number of tests, in at most three lines; `pytest -rs` has them all.

        Reasons are cut to 60 characters.
        """
        reasons = [
            f"{count} {textwrap.shorten(reason, 60, placeholder='...')}"
            for reason, count in self.skips.most_common()
        ]
        said = f"skipped: {', '.join(reasons)}" if reasons else ""
        return textwrap.wrap(said, WIDTH, max_lines=3, placeholder=" ...")
