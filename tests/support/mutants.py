"""Mistakes that are put into a copy of the sources, to see that tests notice them."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

M = TypeVar("M")


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One edit of one file."""

    file: str
    text: str  # occurs there exactly once
    replacement: str = ""

    def of(self, source: str) -> str:
        """The file's text with the mistake. Raises ValueError unless `text` is in it once."""
        count = source.count(self.text)
        if count != 1:
            raise ValueError(
                f"{self.file} has {self.text!r} {count} times, expected once: "
                "adapt the mutant to the changed source"
            )
        return source.replace(self.text, self.replacement)


def read_mutants(folder: Path, made: Callable[[dict[str, Any]], M]) -> dict[str, M]:
    """What `made` makes of each table of all .toml files in a folder, by what is wrong with it."""
    return {
        name: made(fields)
        for file in sorted(folder.glob("*.toml"))
        for name, fields in tomllib.loads(file.read_text()).items()
    }
