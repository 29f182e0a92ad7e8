"""Progress in a log: some lines, where a terminal has a bar that moves."""

from __future__ import annotations

import io
import sys

import pytest
from progress import Bar


@pytest.mark.parametrize("watched", [True, False])
def test_a_log_gets_a_line_for_each_ten_per_cent(
    watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: watched)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: watched)
    log = io.StringIO()
    with Bar(total=750, file=log, mininterval=0) as bar:
        for step in range(750):
            bar.set_description(f"loss {step}", refresh=step % 10 == 0)
            bar.update()
            bar.set_postfix_str("about 01:00 left")
    written = log.getvalue()
    if watched:
        assert written.count("\r") > 100
        return
    assert "\r" not in written
    shares = [line.split("%")[0].rpartition(" ")[2] for line in written.split("\n") if line]
    assert shares == [str(share) for share in range(0, 101, 10)]
