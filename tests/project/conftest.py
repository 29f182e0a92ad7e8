"""What nvcc makes of all kernels for sm_90, compiled once for all tests that look at it."""

from __future__ import annotations

import re
from pathlib import Path

import kernel_report
import pytest
import recorded_step
from kernel_path import ARCH, Measured

CSRC = Path(__file__).resolve().parents[2] / "csrc"
_LISTED = re.findall(r"X\((\w+), \w+_\)", (CSRC / "core/rules.h").read_text())
EVERY_RULE = tuple(rule for rule in _LISTED if rule not in ("LAMB", "Muon"))


@pytest.fixture(params=EVERY_RULE)
def any_rule(request: pytest.FixtureRequest) -> str:
    """Each rule that is recorded."""
    return request.param


@pytest.fixture(scope="session")
def compiled() -> kernel_report.Report:
    """The report on all of csrc/cuda; tests that use it are slow and in one xdist_group."""
    if reason := kernel_report.why_unavailable():
        pytest.skip(f"the kernels are not compiled: {reason}")
    return kernel_report.report(sorted((CSRC / "cuda").glob("*.cu")), ARCH)


@pytest.fixture(scope="session")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that records steps of every rule whose apply needs no pass before it."""
    if reason := kernel_report.why_no_paths():
        pytest.skip(f"machine code is not followed: {reason}")
    return recorded_step.build_recorder(tmp_path_factory.mktemp("recorder"), EVERY_RULE)


@pytest.fixture(scope="session")
def followed(recorder: Path, compiled: kernel_report.Report) -> list[Measured]:
    """The main path of the apply kernels of common rules, for every preset and alignment."""
    return kernel_report.paths(compiled.kernels, recorder)
