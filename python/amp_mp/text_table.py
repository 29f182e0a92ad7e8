"""How tables are written as text, and the shares, sizes, scales and dtypes in them."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch


def aligned(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """The header and a line for each row, in aligned columns; None is an empty cell."""
    lines = [header, *(["" if cell is None else str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def percent(share: float) -> str:
    """A share from 0 to 1 in percent. Only 0 and 1 themselves are written as 0.00% and 100.00%."""
    if 0 < share < 0.0001:
        return "<0.01%"
    if 0.9999 < share < 1:
        return ">99.99%"
    return f"{share:.2%}"


def size_text(size: int) -> str:
    """A number of bytes in the largest unit of which there is at least one."""
    unit = min(max(size.bit_length() - 1, 0) // 10, 4)
    return f"{size / 1024**unit:.{2 * (unit > 0)}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def scale_text(scale: float) -> str:
    """A loss scale; a power of two is written as 2^k."""
    fraction, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if fraction == 0.5 else f"{scale:g}"


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")
