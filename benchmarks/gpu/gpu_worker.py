"""One list of gpu_step.py in a process of its own: a kernel that fails takes only this one along.

What is known is written to a file after every candidate, with the name of the one that is running,
so that the caller can go on without it. Exit status 3: the device is unusable after that one.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpu_candidates import Candidate, Copy
from gpu_counts import as_dict, count
from gpu_environment import clocks
from gpu_lists import ShapeList, shape_lists
from gpu_peers import candidates
from gpu_timing import Ceilings, Timed, copies_needed, finish, interleave, median, quartiles

DEVICE_LOST = 3
TRACED = 7  # steps in the trace of a candidate
SECONDS = 40.0  # for a candidate's building, timing or counting
Entry = dict[str, Any]


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block after so many seconds (a compiler's, say)."""

    def over(*_: object) -> None:
        raise TimeoutError(f"took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Worker:
    """Times a list's candidates, counts their launches, and keeps the file up to date.

    A candidate is built once. On large lists, where only one fits into memory, it is counted right
    after it is timed. Tracing may slow down the launches of those that come later; there they are a
    thousandth of a step. On small lists all are timed before the first is counted.
    """

    def __init__(self, shapes: ShapeList, device: str, quick: bool, path: Path, seconds: float):
        """`seconds`: for everything; what has not begun by then is not run."""
        self.shapes, self.device, self.quick, self.path = shapes, device, quick, path
        self.deadline = time.perf_counter() + seconds
        self.entries: dict[str, Entry] = {}
        self.ceilings: dict[str, float] = {}
        self.cache = 50_000_000
        if device == "cuda":
            self.cache = torch.cuda.get_device_properties(0).L2_cache_size

    def save(self, running: str | None = None) -> None:
        content = {"running": running, "ceilings": self.ceilings, "candidates": self.entries}
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(content))
        fresh.replace(self.path)

    def guard(self, name: str, work: Callable[[], None], what: str = "error") -> bool:
        """Runs a candidate's work; an exception becomes its `what`. False if there was one."""
        left = self.deadline - time.perf_counter()
        try:
            if left <= 0:
                raise TimeoutError("not run: no time left")
            self.save(running=name)
            with limit(min(SECONDS, left + 5)):
                work()
                finish(self.device)
            self.save()
            return True
        except Exception as error:
            cause = error.__cause__ or error
            text = f"{type(cause).__name__}: {str(cause).strip()}".partition("\n")[0][:200]
            self.entries.setdefault(name, {})[what] = text
        try:
            finish(self.device)
        except Exception:  # nothing on this device works any more in this process
            self.save(running=name)
            os._exit(DEVICE_LOST)
        return False

    def build(self, candidate: Candidate, rotated: bool) -> tuple[list[Copy], Timed]:
        """The candidate's copies, after three steps each."""
        moved = candidate.moved(self.shapes)
        number = 1
        if rotated:
            number = copies_needed(moved, self.cache, most=2 if self.quick else 40)
        copies = [candidate.build(self.shapes, self.device) for _ in range(number)]
        for copy in copies:
            for _ in range(3):
                copy.run()
        self.entries[candidate.name] = {"bytes": moved, "copies": number}
        return copies, Timed(candidate.name, [copy.run for copy in copies])

    def record(self, candidate: Candidate, copies: list[Copy], timed: Timed, copy: float) -> None:
        """A candidate's figures, `copy` being the copy bandwidth measured beside it, GB/s."""
        entry = self.entries[candidate.name]
        seconds = median(timed.device)
        rate = entry["bytes"] / seconds / 1e9
        entry |= {
            "ms": 1e3 * seconds,
            "ms_quartiles": [1e3 * s for s in quartiles(timed.device)],
            "host_ms": 1e3 * median(timed.host),
            "host_ms_quartiles": [1e3 * s for s in quartiles(timed.host)],
            "clocks": clocks() if self.device == "cuda" else None,
            "rounds": len(timed.device),
            "gb_s": rate,
            "copy_gb_s": copy,
            "share": rate / copy,
        }
        if link := candidate.link(self.shapes):
            entry["link_gb_s"] = link / seconds / 1e9
        wrong = [text for text in (c.verify() for c in copies) if text]
        if wrong:
            raise RuntimeError(wrong[0])

    def free(self) -> None:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def run(self, wanted: list[Candidate]) -> None:
        """Everything."""
        ceilings = Ceilings(self.device, 10_000 if self.quick else 2**28)
        (self.one_by_one if self.shapes.large else self.together)(wanted, ceilings)
        self.save()

    def one_by_one(self, wanted: list[Candidate], ceilings: Ceilings) -> None:
        """Large lists: in memory one at a time, each between ceilings of its own."""
        copies: list[Copy] = []
        for candidate in wanted:
            copies.clear()
            self.free()
            if self.guard(candidate.name, lambda c=candidate: self.alone(c, ceilings, copies)):
                self.count(candidate, copies)

    def alone(self, candidate: Candidate, ceilings: Ceilings, copies: list[Copy]) -> None:
        """Builds the candidate into `copies` and times it."""
        copies[:], timed = self.build(candidate, rotated=False)
        group = [*ceilings.timed(), timed]
        rounds = 3 if self.quick else 15
        interleave(
            group,
            self.device,
            rounds=rounds,
            seconds=3.0,
            head_start=True,
            guard=lambda _, work: work() is None,  # the guard around this one tells
        )
        rates = ceilings.rates(group)
        for name, rate in rates.items():
            self.ceilings[name] = max(rate, self.ceilings.get(name, 0.0))
        self.record(candidate, copies, timed, rates["copy"])

    def together(self, wanted: list[Candidate], ceilings: Ceilings) -> None:
        """Small lists: all in memory, all in turn."""
        built: dict[str, list[Copy]] = {}
        group = ceilings.timed()

        def make(candidate: Candidate) -> None:
            copies, timed = self.build(candidate, rotated=True)
            built[candidate.name] = copies
            group.append(timed)

        for candidate in wanted:
            self.guard(candidate.name, lambda c=candidate: make(c))
        left = self.deadline - time.perf_counter()
        interleave(
            group,
            self.device,
            rounds=3 if self.quick else 60,
            seconds=max(2.0, 0.5 * left),
            head_start=False,
            guard=lambda timed, work: self.guard(timed.name, work),
        )
        self.ceilings = ceilings.rates(group)
        by_name = {timed.name: timed for timed in group}
        copy = self.ceilings.get("copy", math.nan)
        for candidate in wanted:
            name = candidate.name
            if not self.entries[name].get("error"):
                self.guard(
                    name,
                    lambda c=candidate: self.record(c, built[c.name], by_name[c.name], copy),
                )
        for candidate in wanted:
            if not self.entries[candidate.name].get("error"):
                self.count(candidate, built[candidate.name])

    def count(self, candidate: Candidate, copies: list[Copy]) -> None:
        """Kernels and waits of one more step of what has been timed; quartiles of some more."""

        def work() -> None:
            runs = [copy.run for copy, _ in zip(itertools.cycle(copies), range(TRACED))]
            steps = count(self.device, *runs)
            names = steps[0].kernel_us
            times = {n: quartiles([s.kernel_us.get(n, 0.0) for s in steps]) for n in names}
            self.entries[candidate.name] |= {**as_dict(steps[0]), "kernel_us": times}

        self.guard(candidate.name, work, "not_counted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("key", help="of the list: one, llama, resnet50, many")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true", help="tiny lists, no other libraries")
    parser.add_argument("--seconds", type=float, default=60.0, help="for everything (60)")
    parser.add_argument("--skip", nargs="*", default=[], help="candidates to leave out")
    parser.add_argument("--json", type=Path, required=True, help="where results go")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)  # the threads' own time would be all there is
    shapes = next(s for s in shape_lists(arguments.quick) if s.key == arguments.key)
    worker = Worker(shapes, arguments.device, arguments.quick, arguments.json, arguments.seconds)
    wanted = candidates(shapes, arguments.device, others=not arguments.quick)
    worker.run([c for c in wanted if c.name not in arguments.skip])


if __name__ == "__main__":
    main()
