"""A progress bar whose output can also be kept in a log."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


class Bar(tqdm):
    """tqdm's bar in a terminal; elsewhere a line for each ten per cent."""

    tenths = -1  # of the whole, when the last line was written

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Shows the bar as it is now."""
        if sys.stdout.isatty() and sys.stderr.isatty():
            return super().display(msg, pos)
        tenths = 10 * self.n // max(self.total, 1)
        if tenths > self.tenths:
            self.tenths = tenths
            self.fp.write(f"{self}\n")
        return True
