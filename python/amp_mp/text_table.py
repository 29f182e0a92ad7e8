"""Plain text tables."""

from __future__ import annotations

from collections.abc import Iterable


def aligned(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """The rows under their header, with the columns aligned to the left."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
