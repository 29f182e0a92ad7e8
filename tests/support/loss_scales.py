"""Overflows that a loss-scale policy observes."""

from __future__ import annotations

import random


def script(length: int, share: float, seed: int) -> list[bool]:
    """Overflows, in bursts and far apart: of random density, and so of any gap length."""
    source = random.Random(seed)
    overflows: list[bool] = []
    while len(overflows) < length:
        density = share * source.choice([0.0, 0.1, 1.0, 10.0])
        overflows += [source.random() < density for _ in range(source.randrange(1, 3000))]
    return overflows[:length]
