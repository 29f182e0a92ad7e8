"""Shows the casts that operators make."""

from collections.abc import Callable
from typing import Any, NamedTuple

from amp_mp import _C
from amp_mp.text_table import aligned

OFF, PRINT, RECORD = 0, 1, 2  # csrc/torch/casting/trace.h

_mode = OFF  # outside of explain


class Cast(NamedTuple):
    """One cast: the operator, its argument, the dtypes, and whether the cache had the result."""

    op: str
    argument: str
    from_dtype: str
    to_dtype: str
    cached: bool


class CastTable(list[Cast]):
    """Casts in the order in which they were made; prints as a table."""

    def __str__(self) -> str:
        rows = ((*cast[:4], "cached" if cast.cached else "") for cast in self)
        return aligned(("operator", "argument", "from", "to", ""), rows)


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> CastTable:
    """Calls the function once and returns the casts that its operators made, as a table.

    Only operators with a policy of amp_mp's report. A weight whose cast came from the cache is
    listed too, and marked. Use it in a region with casts on.
    """
    _C.casting.take_log()
    _C.casting.set_trace(RECORD)
    try:
        function(*args, **kwargs)
    finally:
        _C.casting.set_trace(_mode)
    return CastTable(Cast(*row) for row in _C.casting.take_log())


def set_verbose(verbose: bool) -> None:
    """Prints every cast to stderr while on."""
    global _mode
    _mode = PRINT if verbose else OFF
    _C.casting.set_trace(_mode)
