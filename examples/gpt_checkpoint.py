"""Checkpoints of train_gpt.py: a file of one process, or a folder that any number can read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import amp_mp as amp


def save(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, folder: bool, **more: Any
) -> None:
    """Writes the checkpoint; `more` are numbers, strings and lists of them.

    folder: by amp_mp.checkpoint, which every process must call. Else a file; a crash never leaves
    half of one.
    """
    if folder:
        amp.checkpoint.save(path, model, optimizer, **more)
        return
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renaming is atomic only within one file system, so the temporary file is in that folder.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load(
    path: Path | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    check: Any,
) -> dict[str, Any]:
    """Loads a checkpoint of either kind and returns what else was saved with it.

    check: called with what else was saved; of a file before anything is loaded. Raises
    FileNotFoundError where there is none.
    """
    if path is None or not path.exists():
        raise FileNotFoundError(f"nothing to resume: no checkpoint at {path}")
    if path.is_dir():
        more: dict[str, Any] = amp.checkpoint.load(path, model, optimizer)
        check(more)
        return more
    content: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    check(content)
    model.load_state_dict(content.pop("model"))
    optimizer.load_state_dict(content.pop("optimizer"))
    return content
