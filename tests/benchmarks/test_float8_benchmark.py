"""benchmarks/float8.py prints its table."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/float8.py"


@pytest.mark.slow
def test_each_candidate_has_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["float8.py", "--quick"])
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    threads = torch.get_num_threads()
    runpy.run_path(str(SCRIPT), run_name="__main__")
    torch.set_num_threads(threads)
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("│")
    ]
    assert [row[0] for row in rows] == [
        *("copy", "float8_128x128", "float8_128x128_power", "mxfp8"),
        "float8_128x128 in plain torch",
    ]
    assert rows[0][2] == "1.00 (1.00 to 1.00)"
    assert all(float(cell.split()[0]) > 0 for row in rows for cell in row[1:])
