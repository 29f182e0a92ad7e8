"""Prepares torchvision before any library imports it, and prints the table of loss differences."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
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
    """The whole table, of which docs/benchmarks.md has a part.

    AMP_MP_ZOO_TABLE names a file to write it to as well.
    """
    lines = sorted(config.stash.get(ROWS, []), key=str.casefold)
    if lines:
        terminalreporter.section("loss differences")
        terminalreporter.write_line("\n".join(lines))
    if path := os.environ.get("AMP_MP_ZOO_TABLE"):
        Path(path).write_text("\n".join(lines) + "\n")


@pytest.fixture
def run_on(tmp_path: Path) -> Callable[[int, str], list[str]]:
    """Runs a script on so many processes; the lines that they print."""

    def run(processes: int, script: str) -> list[str]:
        file = tmp_path / "script.py"
        file.write_text(script)
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command.append(f"--nproc-per-node={processes}")
        folders = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        done = subprocess.run(
            [*command, str(file)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": folders},
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[:8000]
        return done.stdout.splitlines()

    return run
