"""How far the tests are, for a log: a line for each ten per cent."""

from __future__ import annotations

import pytest


class LogProgress:
    """A plugin of pytest that writes few lines, where its reporter has a dot for each test."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self.reporter = reporter
        self.ended = self.tenths = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No letter for a test that passes or is skipped; others keep theirs."""
        ended = report.when == "call" or not report.passed
        quiet = ended and not report.failed and not hasattr(report, "wasxfail")
        return (report.outcome, "", "") if quiet else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Writes the line, after the last report of a test."""
        if report.when != "teardown":
            return
        self.ended += 1
        of = self.reporter._session.testscollected  # pytest-xdist sets this, too
        if 10 * self.ended // of > self.tenths:
            self.tenths = 10 * self.ended // of
            self.reporter.ensure_newline()
            self.reporter.write_line(f"{10 * self.tenths:3} %: {self.ended} of {of} tests")
