"""The documentation names nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FEATURES = (ROOT / "docs" / "features.md").read_text()
ROWS = re.findall(r"^\| ((?:OS|NV|RP|AX)-\w+) \|.*\| (.*) \|$", FEATURES, re.MULTILINE)


def test_every_row_of_the_features_is_listed_once() -> None:
    counts = {"OS": 16, "NV": 15, "RP": 15, "AX": 25}
    wanted = {f"{name}-{i}" for name, count in counts.items() for i in range(1, count + 1)}
    found = [row for row, _ in ROWS]
    assert len(found) == len(set(found))
    assert set(found) == wanted | {"OS-3a", "OS-6a", "NV-10a"}


@pytest.mark.parametrize(("row", "tests"), ROWS)
def test_the_tests_that_a_feature_names_exist(row: str, tests: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
    assert named, row
    for file, test in named:
        assert f"\ndef {test}(" in (ROOT / file).read_text(), f"{file}::{test}"


@pytest.mark.parametrize("document", sorted(p.name for p in (ROOT / "docs").glob("*.md")))
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / "docs" / document).read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / "docs" / target).exists(), target
