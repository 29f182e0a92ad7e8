"""benchmarks/changes.py prints its tables."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/changes.py"


@pytest.mark.slow
def test_each_part_prints_its_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["changes.py", "--quick"])
    threads = torch.get_num_threads()
    runpy.run_path(str(SCRIPT), run_name="__main__")
    torch.set_num_threads(threads)
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("│")
    ]
    ways = ["amp.Changes", "snapshot, compared"]
    assert [row[0] for row in rows] == [
        *("exact", "lean", "tiny", "micro", "float32 weights"),
        *(*ways, "snapshot on the host", "all weights") * 2,
        *ways,
        *("step 1", "step 2", "step 3", "median of all"),
    ]
    held = {name: float(bytes_) for name, bytes_, _ in rows[13:15]}
    assert held == {ways[0]: pytest.approx(1 / 8, abs=0.002), ways[1]: 2.0}
    for _, share, *_ in rows[:5]:
        assert 0.0 < float(share.removesuffix("%")) < 10.0
