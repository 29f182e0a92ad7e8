"""benchmarks/setup.py prints its table."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/setup.py"


def test_each_case_has_both_times_and_their_ratio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["setup.py", "--tensors", "4", "--turns", "1"])
    monkeypatch.setenv("COLUMNS", "110")
    threads = torch.get_num_threads()
    runpy.run_path(str(SCRIPT), run_name="__main__")
    torch.set_num_threads(threads)
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("│")
    ]
    assert [name for name, *_ in rows] == [
        "ordinary step",
        "first step",
        "step after load_state_dict",
        "step in which one parameter wakes",
        "load_state_dict, same format",
        "load_state_dict, exact to tiny",
    ]
    for _, own, theirs, ratio, low, high in rows:
        assert float(own) > 0 < float(theirs)
        assert ratio == low == high  # one turn
        assert ratio.endswith("x")
