"""A disk with little room, as torch's writer of checkpoints meets it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class SmallDisk(io.FileIO):
    """A file on a disk that has so many bytes left."""

    def __init__(self, path: Path, left: int, watch: Callable[[], object]) -> None:
        super().__init__(path, "w")
        self.left, self.watch = left, watch

    def write(self, data: Any) -> int:
        if len(data) > 4096:
            self.watch()
        self.left -= len(data)
        if self.left < 0:
            raise OSError(28, "No space left on device")
        return super().write(data)


@contextmanager
def small_disk(
    monkeypatch: pytest.MonkeyPatch, left: int, watch: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Data files of checkpoints get so many bytes each. watch: called before each array."""
    opened = Path.open

    def small(self: Path, *arguments: Any, **keywords: Any) -> Any:
        if self.suffix == ".distcp":
            return SmallDisk(self, left, watch)
        return opened(self, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", small)
        yield
