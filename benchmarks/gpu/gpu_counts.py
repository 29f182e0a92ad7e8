"""Kernels, their times, and waits of the host, in a step: from a trace by torch.profiler.

torch's own sync debug mode sees torch's calls alone; the profiler sees every call of CUDA's runtime
and driver, amp_mp's included.
"""

from __future__ import annotations

import collections
import functools
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_timing import finish
from torch.profiler import ProfilerActivity, profile, record_function

LABEL = "amp_mp: counted"
WAITS = re.compile(
    r"^(cuda(Stream|Device|Event|Thread)Synchronize|cu(Stream|Ctx|Event)Synchronize"
    r"|cudaMemcpy(ToSymbol|FromSymbol|2D|3D)?|cuMemcpy(DtoH|HtoD|DtoD)?(_v2)?)(_ptsz|_ptds|_v\d+)*$"
)


@dataclass(frozen=True)
class Counts:
    """What happened in the counted region.

    launches: kernels, memory fills and copies on the device; kernels: how many by name; kernel_us:
    their time on the device by name, microseconds; waits: calls that keep the host until the device
    is done; to_host: copies from device to host, each of which is waited for before its value is
    used.
    """

    launches: int
    kernels: dict[str, int]
    kernel_us: dict[str, float]
    waits: int
    to_host: int


def counted(events: Iterable[dict[str, Any]], regions: int = 1) -> list[Counts]:
    """Counts of a trace's events (Chrome's format) whose calls lie inside each region named LABEL.

    What runs on the device belongs to the call with the same correlation. Raises ValueError where
    the trace has not so many regions.
    """
    whole = [e for e in events if e.get("ph") == "X"]
    found = [e for e in whole if e["name"] == LABEL and e.get("cat") == "user_annotation"]
    if len(found) != regions:
        raise ValueError(f"the trace has {len(found)} regions {LABEL!r}, expected {regions}")
    return [_counted(whole, r["ts"], r["ts"] + r["dur"]) for r in found]


def _counted(whole: list[dict[str, Any]], start: float, end: float) -> Counts:
    calls = [
        e
        for e in whole
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and start <= e["ts"] <= end
    ]
    ours = {e["args"]["correlation"] for e in calls if "correlation" in e.get("args", {})}
    device = [
        e
        for e in whole
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        and e.get("args", {}).get("correlation") in ours
    ]
    kernels = [e for e in device if e["cat"] == "kernel"]
    names = collections.Counter(short(e["name"]) for e in kernels)
    times = dict.fromkeys((name for name, _ in names.most_common()), 0.0)
    for e in kernels:
        times[short(e["name"])] += e["dur"]
    return Counts(
        launches=len(device),
        kernels=dict(names.most_common()),
        kernel_us=times,
        waits=sum(bool(WAITS.match(e["name"])) for e in calls),
        to_host=sum(e["cat"] == "gpu_memcpy" and "DtoH" in e["name"] for e in device),
    )


def short(kernel: str) -> str:
    """A kernel's name without what it returns, its template arguments and its parameters."""
    depth, plain = 0, ""
    name = kernel.replace("(anonymous namespace)::", "")
    for character in name.removeprefix("void "):
        depth += (character in "<(") - (character in ">)")
        if depth == 0 and character not in ">)":
            plain += character
    return plain.strip()[:80]


def activities(device: str) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]


@functools.cache
def warm_up(device: str) -> None:
    """One trace for nothing: the first one begins before CUDA's tracing does."""
    with profile(activities=activities(device)):
        torch.ones(1, device=device).add_(1)
        if device == "cuda":
            torch.cuda.synchronize()


@contextmanager
def _tracing(device: str, regions: int) -> Iterator[list[Counts]]:
    """Traces what its block does; the counts of its regions are in the list when it has ended."""
    warm_up(device)
    finish(device)
    found: list[Counts] = []
    with profile(activities=activities(device)) as profiled:
        yield found
        finish(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        found += counted(json.loads(path.read_text())["traceEvents"], regions)


@contextmanager
def counting(device: str) -> Iterator[list[Counts]]:
    """Counts what its block does; they are in the list when it has ended.

    What is counted should have been done before: first calls set things up.
    """
    with _tracing(device, 1) as found, record_function(LABEL):
        yield found


def count(device: str, *runs: Callable[[], object]) -> list[Counts]:
    """Counts of each call, in one trace; the device has finished the one before."""
    with _tracing(device, len(runs)) as found:
        for run in runs:
            finish(device)
            with record_function(LABEL):
                run()
    return found


def as_dict(counts: Counts) -> dict[str, Any]:
    """For JSON."""
    return asdict(counts)
