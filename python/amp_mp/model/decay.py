"""How fast an average forgets."""

from collections.abc import Callable
from typing import Any

Decay = float | Callable[[int], float] | None  # AveragedModel explains it


def check_decay(decay: Any, warmup: bool) -> None:
    """Raises TypeError or ValueError naming the argument."""
    if decay is not None and not callable(decay):
        _number(decay)
    elif warmup:
        raise ValueError(f"warmup needs a number as decay, found {decay!r}")


def decay_after(count: int, decay: Decay, warmup: bool) -> float:
    """The decay of the update that follows `count` updates.

    Raises TypeError or ValueError where a function returns something else than a number of [0, 1].
    """
    if count == 0:
        return 0.0
    if decay is None:
        return count / (count + 1)
    found = _number(decay(count) if callable(decay) else decay)
    return min(found, (1 + count) / (10 + count)) if warmup else found


def _number(decay: Any) -> float:
    if not isinstance(decay, int | float) or isinstance(decay, bool):
        raise TypeError(f"decay must be a number, a function of a number or None, found {decay!r}")
    if not 0 <= decay <= 1:
        raise ValueError(f"decay must be in [0, 1], found {decay!r}")
    return float(decay)
