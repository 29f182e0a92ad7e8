"""The native library with arguments that no Python code of the package would hand it."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import Script, run_each
from tiers import full

SCRIPT = Path(__file__).parents[1] / "support/native_fuzz.py"
COUNT = 250


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *(full(n) for n in range(COUNT, 8 * COUNT, COUNT))])
def test_no_argument_ends_the_process(first: int) -> None:
    """Nor does any make it write beyond a tensor."""
    (done,) = run_each([Script([str(SCRIPT), str(first), str(COUNT)])])
    seeds = done.stdout.split()
    assert done.returncode == 0, f"seed {seeds[-1] if seeds else '?'}:\n{done.stderr[-3000:]}"
    assert len(seeds) == COUNT
