"""Prepares torchvision before any library imports it, and prints the table of loss differences."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torchvision_ops

torchvision_ops.install()

ROWS = pytest.StashKey[list[str]]()


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Any:
    """Adds a line to the table at the end."""
    return request.config.stash.setdefault(ROWS, []).append


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The whole table of which docs/experiments.md has a part; AMP_MP_ZOO_TABLE names a file to write it to as well."""
    lines = sorted(config.stash.get(ROWS, []), key=str.casefold)
    if lines:
        terminalreporter.section("loss differences")
        terminalreporter.write_line("\n".join(lines))
    if path := os.environ.get("AMP_MP_ZOO_TABLE"):
        Path(path).write_text("\n".join(lines) + "\n")
