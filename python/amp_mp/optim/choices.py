"""The check of an argument that takes one of a few names."""

from collections.abc import Collection
from typing import Any


def check_choice(name: str, found: Any, known: Collection[str]) -> None:
    """Raises ValueError naming the argument and what it may be."""
    if found not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}; found {found!r}")
