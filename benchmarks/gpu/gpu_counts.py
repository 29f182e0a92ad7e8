"""Kernels, and waits of the host, in a step: counted in a trace by torch.profiler.

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
from torch.profiler import ProfilerActivity, profile, record_function

LABEL = "amp_mp: counted"
WAITS = re.compile(
    r"^(cuda(Stream|Device|Event|Thread)Synchronize|cu(Stream|Ctx|Event)Synchronize"
    r"|cudaMemcpy(ToSymbol|FromSymbol|2D|3D)?|cuMemcpy(DtoH|HtoD|DtoD)?(_v2)?)(_ptsz|_ptds|_v\d+)*$"
)


@dataclass(frozen=True)
class Counts:
    """What happened in the counted region.

    launches: kernels, memory fills and copies on the device; kernels: how many by name; waits:
    calls that keep the host until the device is done; to_host: copies from device to host, each
    of which is waited for before its value is used.
    """

    launches: int
    kernels: dict[str, int]
    waits: int
    to_host: int


def counted(events: Iterable[dict[str, Any]]) -> Counts:
    """Counts of a trace's events (Chrome's format) whose calls lie inside the region named LABEL.

    What runs on the device belongs to the call with the same correlation. Raises ValueError where
    the region is not in the trace exactly once.
    """
    whole = [e for e in events if e.get("ph") == "X"]
    regions = [e for e in whole if e["name"] == LABEL and e.get("cat") == "user_annotation"]
    if len(regions) != 1:
        raise ValueError(f"the trace has {len(regions)} regions {LABEL!r}, expected one")
    start, end = regions[0]["ts"], regions[0]["ts"] + regions[0]["dur"]
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
    names = collections.Counter(short(e["name"]) for e in device if e["cat"] == "kernel")
    return Counts(
        launches=len(device),
        kernels=dict(names.most_common()),
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
def counting(device: str) -> Iterator[list[Counts]]:
    """Counts what its block does; they are in the list when it has ended.

    What is counted should have been done before: first calls set things up.
    """
    warm_up(device)
    if device == "cuda":
        torch.cuda.synchronize()
    found: list[Counts] = []
    with profile(activities=activities(device)) as profiled:
        with record_function(LABEL):
            yield found
        if device == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        found.append(counted(json.loads(path.read_text())["traceEvents"]))


def count(run: Callable[[], object], device: str) -> Counts:
    """Counts of one call."""
    with counting(device) as found:
        run()
    return found[0]


def as_dict(counts: Counts) -> dict[str, Any]:
    """For JSON."""
    return asdict(counts)
