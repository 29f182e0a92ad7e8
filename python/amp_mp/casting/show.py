"""Tables that print as such."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Cast(NamedTuple):
    """One cast: the operator, its argument, the dtypes, and whether the cache had the result."""

    op: str
    argument: str
    from_dtype: str
    to_dtype: str
    cached: bool


class CastTable(list[Cast]):
    """Casts in the order in which they were made."""

    def __str__(self) -> str:
        """A line each."""
        return aligned(
            ("operator", "argument", "from", "to", ""),
            ((*cast[:4], "cached" if cast.cached else "") for cast in self),
        )


class PolicyTable(dict[str, str]):
    """Operators by overload, and the policy of each."""

    def __str__(self) -> str:
        """A line each, by policy and name."""
        rows = sorted(self.items(), key=lambda row: (row[1], row[0]))
        return aligned(("operator", "policy"), rows)


def aligned(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """The rows under their header, in columns."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
