"""Interrupts at chosen lines of the package, as a Ctrl-C or an exception of a debugger may come."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import amp_mp as amp

PACKAGE = str(Path(amp.__file__).parent)


class Interrupt(BaseException):
    """What is raised at a line."""


def lines_of(run: Callable[[], Any]) -> int:
    """How many lines of the package a call runs."""
    return _traced(run, -1)


def interrupted(run: Callable[[], Any], line: int) -> None:
    """Runs and raises Interrupt before the package's line of this number, from 0.

    Where garbage is collected, a run may have a few lines more or less; then it ends as usual.
    """
    with suppress(Interrupt):
        _traced(run, line)


def _traced(run: Callable[[], Any], stop: int) -> int:
    seen = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            seen += 1
            if seen == stop + 1:
                sys.settrace(None)
                raise Interrupt
        return trace

    run_traced(run, trace)
    return seen


def run_traced(run: Callable[[], Any], trace: Callable[[FrameType, str, Any], Any]) -> None:
    """Runs with this sys.settrace function, and afterwards puts back the one of before."""
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
