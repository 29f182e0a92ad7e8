"""The file of the results: every part of `make gpu` adds to it as soon as it knows something.

Figures of different code, GPUs or torch versions are never in one file: `begin` puts an older one
aside. The file is replaced as a whole, so what can be read is always valid JSON.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

Content = dict[str, Any]
IDENTITY = ("source", "gpu", "driver", "torch", "cuda", "quick")


def file_name(gpu: str | None) -> str:
    """Of the results of that GPU."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", gpu or "cpu")[:60] + ".json"


def load(path: Path) -> Content:
    """What is there; nothing where no file is."""
    return json.loads(path.read_text()) if path.exists() else {}


def save(path: Path, content: Content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(content, indent=1) + "\n")
    fresh.replace(path)


def update(path: Path, new: Content) -> Content:
    """Adds to what is there; returns all of it."""
    content = {**load(path), **new}
    save(path, content)
    return content


def begin(path: Path, environment: Content) -> Content:
    """Starts the file, or goes on with it if it is of the same code, GPU and torch.

    Any other one is renamed after its commit or code, and that is printed.
    """
    try:
        content = load(path)
        of = str(content.get("commit") or content.get("source") or "unknown")[:12]
    except ValueError:  # a file that some other program has cut
        content, of = {}, "broken"
    if path.exists() and any(content.get(key) != environment[key] for key in IDENTITY):
        aside = path.with_name(f"{path.stem}-{of}.json")
        number = 1
        while aside.exists():
            number += 1
            aside = path.with_name(f"{path.stem}-{of}-{number}.json")
        path.rename(aside)
        print(f"{path.name} was of other code, another GPU or torch: it is {aside.name} now")
    return update(path, environment)
