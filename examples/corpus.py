"""Training text that every Python installation has: the source of its standard library."""

from __future__ import annotations

import functools
import math
import os
import random
from pathlib import Path

import torch

TEXT_BYTES = 8_000_000
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@functools.cache
def load_text(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``*.py`` files below ``folder`` as (training, validation) bytes, one-dimensional uint8.

    The validation bytes are whole files, the same ones every time. Raises FileNotFoundError if
    there are fewer than two files.
    """
    files: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        files += [Path(parent, name) for name in sorted(names) if name.endswith(".py")]
    if len(files) < 2:
        raise FileNotFoundError(f"no text: fewer than two Python files under {folder}")
    random.Random(0).shuffle(files)
    held_out = math.ceil(len(files) / 20)

    def read(part: list[Path]) -> torch.Tensor:
        text = bytearray()
        for file in part:
            text += file.read_bytes()
            if len(text) >= TEXT_BYTES:
                break
        return torch.frombuffer(text, dtype=torch.uint8)

    return read(files[held_out:]), read(files[:held_out])
