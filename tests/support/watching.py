"""What a piece of code makes a GPU do, or the pretend one: launches, and waits of the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gpu_counts import counting
from helpers import PRETEND_GPU


@dataclass
class Seen:
    """What a piece of code has done to the device."""

    kernels: int = 0
    others: int = 0  # kernels or copies that are not amp_mp's
    waits: int = 0


@contextmanager
def watching() -> Iterator[Seen]:
    """Counts; complete at its end."""
    seen = Seen()
    if PRETEND_GPU:
        from pretend_gpu.device import ledger

        with ledger() as found:
            yield seen
        seen.kernels, seen.others, seen.waits = found.launches, len(found.operators), found.waits
        return
    with counting("cuda") as counts:
        yield seen
    (found,) = counts
    seen.kernels = sum(n for name, n in found.kernels.items() if "amp_mp" in name)
    seen.others = found.launches - seen.kernels
    seen.waits = found.waits + found.to_host
