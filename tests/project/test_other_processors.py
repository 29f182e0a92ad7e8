"""The build for processors without x86-64's instruction sets, and their emulation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from build_tools import native, test_aarch64  # noqa: E402


def test_only_x86_has_three_sets_of_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_x86, loops in ((True, ["avx512", "avx2", "baseline"]), (False, ["baseline"])):
        monkeypatch.setattr(native, "IS_X86", is_x86)
        units = native.kernel_units(None)
        assert [unit.variant for unit in units if unit.source.stem == "loops"] == loops
        assert any("-DAMP_MP_X86" in unit.command for unit in units) == is_x86


def test_what_emulation_needs_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit, match=r"apt install qemu-user-static g\+\+-aarch64-linux-gnu"):
        test_aarch64.qemu()
