"""What tests ask the pretend GPU: what it has been made to do, and to capture a graph.

Only where `install()` has been called.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import amp_mp_pretend_gpu as native
import torch


@dataclass
class Ledger:
    """What happened within `ledger()`; complete when that has ended."""

    operators: list[str] = field(default_factory=list)
    """torch's operators that would have launched at least one kernel, in their order."""
    syncs: list[str] = field(default_factory=list)
    """Where the host would have waited for the device."""
    launches: int = 0
    """Kernels of amp_mp's that ran, those of replays included."""
    argument_bytes: int = 0
    """Of amp_mp's launches, all together."""
    waits: int = 0
    """`syncs`, and cudaStreamSynchronize and its like from amp_mp's own code."""


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Records what all threads do with the device; there is one at a time."""
    found = Ledger()
    native.finish_all()  # delayed kernels count where they were launched
    waits, launches, argument_bytes = native.counts()
    native.open_ledger()
    try:
        yield found
    finally:
        native.finish_all()
        found.operators, found.syncs = native.close_ledger()
        waits_after, launches_after, bytes_after = native.counts()
        found.launches, found.waits = launches_after - launches, waits_after - waits
        found.argument_bytes = bytes_after - argument_bytes


def delay_as_asked(name: str) -> None:
    """Delays kernels if AMP_MP_DELAYED_STREAMS says so, in the order of its seed and the name."""
    asked = os.environ.get("AMP_MP_DELAYED_STREAMS")
    native.set_delay(None if not asked else zlib.crc32(f"{asked} {name}".encode()))


@contextmanager
def delayed_streams(seed: int) -> Iterator[None]:
    """Kernels run when the host or an operator of torch waits for them, in an order by the seed.

    What streams and events promise is kept, and nothing else: see cuda_on_cpu/streams.h.
    """
    native.set_delay(seed)
    try:
        yield
    finally:
        delay_as_asked("")


class CUDAGraph:
    """Stands in for torch.cuda.CUDAGraph: launches recorded with their arguments, to be repeated.

    While it captures, kernels and operators of torch are recorded instead of run, memory may be
    allocated (it lives as long as the graph), and everything else raises RuntimeError: copies from
    and to the host, and all that waits.
    """

    def __init__(self) -> None:
        self._graph = native.Graph()

    def capture_begin(self) -> None:
        self._graph.begin()

    def capture_end(self) -> None:
        self._graph.end()

    def replay(self) -> None:
        self._graph.replay()

    @property
    def launches(self) -> int:
        """How many kernels one replay runs."""
        return int(self._graph.launches)


@contextmanager
def graph(cuda_graph: CUDAGraph) -> Iterator[None]:
    """Stands in for torch.cuda.graph: records what its body launches, on a stream of its own."""
    native.finish_all()
    with torch.cuda.stream(torch.cuda.Stream()):
        cuda_graph.capture_begin()
        try:
            yield
        finally:
            cuda_graph.capture_end()
