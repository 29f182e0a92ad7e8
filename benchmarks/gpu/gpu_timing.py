"""Times of single steps by CUDA events, candidates in turn, and the bandwidth ceilings beside them.

On a large list the stream is kept busy while the host prepares, as it is in training: what counts
is the device. On a small list it is idle, and the host's time counts too. A step that would find
its data in the L2 cache is timed over several copies of model and optimizer in rotation.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

Run = Callable[[], object]
HEAD_START = 1_000_000  # clock cycles, about 0.5 ms


@dataclass
class Timed:
    """A candidate's copies in rotation; its seconds, on the device and until the host is free."""

    name: str
    runs: list[Run]
    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turn: Iterator[Run] = itertools.cycle(self.runs)


def finish(device: str) -> None:
    """Waits for the device; raises what its kernels have done wrong."""
    if device == "cuda":
        torch.cuda.synchronize()


def time_once(run: Run, device: str, head_start: bool) -> tuple[float, float]:
    """Seconds of one call: on the device, and until the call returned."""
    finish(device)
    if device != "cuda":
        start = time.perf_counter()
        run()
        elapsed = time.perf_counter() - start
        return elapsed, elapsed
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if head_start:
        torch.cuda._sleep(HEAD_START)
    begin.record()
    start = time.perf_counter()
    run()
    host = time.perf_counter() - start
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3, host


def interleave(
    group: list[Timed],
    device: str,
    *,
    rounds: int,
    seconds: float,
    head_start: bool,
    guard: Callable[[Timed, Callable[[], None]], bool],
) -> None:
    """Times all of them once a round: `rounds` of them, fewer if `seconds` are over, 3 at least.

    `guard(timed, work)` runs the work and says whether it went well; who fails is left out.
    """
    deadline = time.perf_counter() + seconds
    running = list(group)
    for number in range(rounds):
        for timed in list(running):

            def once(timed: Timed = timed) -> None:
                on_device, on_host = time_once(next(timed.turn), device, head_start)
                timed.device.append(on_device)
                timed.host.append(on_host)

            if not guard(timed, once):
                running.remove(timed)
        if number >= 2 and time.perf_counter() > deadline:
            return


def median(values: list[float]) -> float:
    """The median; NaN of nothing."""
    return statistics.median(values) if values else math.nan


def quartiles(values: list[float]) -> list[float]:
    """First quartile, median and third quartile; of one value three times that."""
    if len(values) < 2:
        return 3 * values
    return statistics.quantiles(values, n=4, method="inclusive")


class Ceilings:
    """What the memory can do: device-to-device copy, reading alone, in place; GB/s each.

    Reading is the faster of two reductions, since neither is known to reach the bandwidth. "link":
    copies from and to pinned memory of the host at once, both ways together.
    """

    def __init__(self, device: str, elements: int) -> None:
        """Elements: of the float32 buffers."""
        self.bytes = 4 * elements
        x = torch.ones(elements, device=device)
        y = torch.empty_like(x)
        self.device, self.beside = device, x[: elements // 8].clone()
        on_gpu = device == "cuda"
        self.host = [torch.empty(elements // 8, pin_memory=on_gpu) for _ in range(2)]
        self.runs: dict[str, tuple[Run, float]] = {
            "copy": (lambda: y.copy_(x), 2),
            "read, sum": (x.sum, 1),
            "read, max": (x.max, 1),
            "in place": (lambda: x.mul_(1.0), 2),
            "link": (lambda: self.both_ways(y[: elements // 8]), 2 / 8),
        }

    def both_ways(self, y: torch.Tensor) -> None:
        """Copies down and up at the same time, on two streams."""
        if self.device != "cuda":
            self.host[0].copy_(self.beside)
            y.copy_(self.host[1])
            return
        here, down = torch.cuda.current_stream(), torch.cuda.Stream()
        down.wait_stream(here)
        with torch.cuda.stream(down):
            self.host[0].copy_(self.beside, non_blocking=True)
        y.copy_(self.host[1], non_blocking=True)
        here.wait_stream(down)

    def timed(self) -> list[Timed]:
        """To be timed in turn with what is held against them."""
        return [Timed(name, [run]) for name, (run, _) in self.runs.items()]

    def rates(self, group: list[Timed]) -> dict[str, float]:
        """GB/s of those in the group that have been timed."""
        rates = {
            t.name: self.runs[t.name][1] * self.bytes / median(t.device) / 1e9
            for t in group
            if t.name in self.runs and t.device
        }
        reads = [rate for name, rate in rates.items() if name.startswith("read")]
        return {**rates, **({"read": max(reads)} if reads else {})}


def copies_needed(moved: float, cache: int, most: int = 40) -> int:
    """How many copies a rotation takes: three caches' worth pass before one comes again."""
    return max(1, min(most, math.ceil(3 * cache / moved)))
