"""amp_mp's warnings fail a test that does not ask for them, by a filter of pyproject.toml."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from helpers import NO_GRADIENT

import amp_mp as amp
from amp_mp.messages import warn

ROOT = Path(__file__).resolve().parents[2]


def test_a_warning_that_no_test_asks_for_is_an_error() -> None:
    """Of any category, and at whatever line: amp_mp's are at the line of its caller."""
    with pytest.raises(UserWarning, match="amp_mp: told"):
        warn("told")
    with pytest.raises(DeprecationWarning, match="amp_mp: told"):
        warnings.warn("amp_mp: told", DeprecationWarning, stacklevel=1)
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(UserWarning, match=NO_GRADIENT):
        amp.optim.SGD([weight], lr=1.0).step()


def test_all_of_amp_mps_warnings_begin_with_its_name() -> None:
    """Which messages.warn writes before them, and the filter looks for."""
    python = (ROOT / "python").rglob("*.py")
    calls = re.compile(r"\bwarnings\.warn\(|\bwarn_explicit\b|from warnings import")
    assert [p.name for p in python for _ in calls.findall(p.read_text())] == ["messages.py"]
    for path in (ROOT / "csrc").rglob("*.*"):
        for told in re.findall(r"\b(?:TORCH_WARN|PyErr_Warn)\w*\(([^;]*)", path.read_text()):
            assert '"amp_mp: ' in told, path
