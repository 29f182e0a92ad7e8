"""A whole optimizer step on a GPU: amp_mp's, torch's, other libraries'; four lists of parameters.

First, on every list, what decides the most: exact's share of the bandwidth of a copy, and exact
and tiny against torch and FlashOptim (gpu_peers.KEY). Then all else. A candidate's figures: time on
the device, time of the host, bytes by formula, share of the copy's bandwidth, kernels and waits of
a step. Each goes to benchmarks/results/<gpu>.json when it is known. A second run goes on where the
first one ended; what was measured of the same code on the same GPU stays, unless --again is given.

    python benchmarks/gpu/gpu_step.py
    python benchmarks/gpu/gpu_step.py --key                   # the deciding ones alone
    python benchmarks/gpu/gpu_step.py --device cpu --quick    # the code, not the speed
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_report
import gpu_results
import torch
from gpu_environment import HERE, RESULTS, environment
from gpu_lists import ShapeList, shape_lists
from gpu_peers import KEY, candidates
from gpu_worker import DEVICE_LOST

import amp_mp as amp

STALLED = 60  # seconds; more than a worker allows a candidate
List = dict[str, Any]
Heard = Callable[[List], object]


def run_worker(
    shapes: ShapeList,
    device: str,
    quick: bool,
    skip: list[str],
    seconds: float,
    path: Path,
    heard: Heard = lambda _: None,
) -> tuple[int | None, str]:
    """One worker: its exit status, None if it hung, and the end of what it said.

    `heard` takes what the worker has written, as soon as there is something new. A kernel that
    never ends cannot be interrupted from within: a worker that has written nothing for STALLED
    seconds is killed.
    """
    command = [sys.executable, str(HERE / "gpu_worker.py"), shapes.key, "--device", device]
    command += ["--json", str(path), "--seconds", f"{seconds:.0f}", *(["--quick"] * quick)]
    command += ["--skip", *skip] if skip else []
    log = path.with_suffix(".log")
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as worker:
        started = last = time.time()
        try:
            while worker.poll() is None:
                time.sleep(0.2)
                written = path.stat().st_mtime if path.exists() else started
                if written > last:
                    last = written
                    heard(json.loads(path.read_text()))
                if time.time() - last > STALLED:
                    return None, f"nothing happened for {STALLED} s"
        finally:
            worker.kill()  # also where this program is ended
    said = [line for line in log.read_text().splitlines() if line and line[:5] != "USDT:"]
    return worker.returncode, said[-1] if said else ""


def timed(entry: dict[str, Any]) -> bool:
    """Whether the candidate was timed and did what it should."""
    return "ms" in entry and "error" not in entry


def done(entry: dict[str, Any]) -> bool:
    """Whether there is nothing to measure again; a trace that time ran out for may work later."""
    counted = "launches" in entry or "no time" not in entry.get("not_counted", "no time")
    return timed(entry) and counted


def add(found: List, part: List) -> None:
    """Adds what a worker has found; an error does not replace figures of an earlier run."""
    for name, rate in part.get("ceilings", {}).items():
        found["ceilings"][name] = max(rate, found["ceilings"].get(name, 0.0))
    for name, entry in part.get("candidates", {}).items():
        if timed(entry) or not timed(found["candidates"].get(name, {})):
            found["candidates"][name] = entry


def run_list(
    shapes: ShapeList,
    device: str,
    quick: bool,
    seconds: float,
    found: List | None = None,
    skip: list[str] | None = None,
    save: Heard = lambda _: None,
) -> List:
    """A list's figures, with a new worker after each candidate that has taken one along.

    found: what is known already, added to; skip: candidates to leave out; save: gets all that is
    known whenever there is more.
    """
    deadline = time.perf_counter() + seconds
    sizes = {"title": shapes.title, "tensors": len(shapes.shapes), "elements": shapes.elements}
    known: List = found or {"ceilings": {}, "candidates": {}}
    known |= sizes
    known.pop("error", None)
    skip = list(skip or [])

    def heard(part: List) -> None:
        add(known, part)
        save(known)

    with tempfile.TemporaryDirectory() as folder:
        for number in range(5):
            path = Path(folder, f"{number}.json")
            left = deadline - time.perf_counter()
            if number and left < 10:
                break
            status, said = run_worker(shapes, device, quick, skip, left, path, heard)
            part = json.loads(path.read_text()) if path.exists() else {}
            add(known, part)
            if status == 0:
                break
            culprit = part.get("running")
            if culprit is None:
                known["error"] = f"the process ended with status {status}: {said}"
                break
            entry = known["candidates"].setdefault(culprit, {})
            if status != DEVICE_LOST:
                what = "not_counted" if timed(entry) else "error"
                entry[what] = f"took its process along, status {status}: {said}"
            measured = [name for name, e in part.get("candidates", {}).items() if "ms" in e]
            skip = sorted({*skip, culprit, *measured})
    save(known)
    return known


def failed(entry: dict[str, Any]) -> bool:
    """Whether an attempt has ended in an error, other than for lack of time."""
    return "no time" not in entry.get("error", "no time")


def names(shapes: ShapeList, device: str, quick: bool, key: bool) -> list[str]:
    """Of a list's candidates; of those in KEY alone."""
    every = [c.name for c in candidates(shapes, device, others=not quick)]
    return [name for name in every if name in KEY] if key else every


def benchmark(
    lists: dict[str, List], device: str, quick: bool, key: bool, seconds: float, save: Heard
) -> None:
    """Fills `lists`: KEY's candidates on every list, then the others, each with a share of time."""
    tasks = [(s, first) for first in ([True] if key else [True, False]) for s in shape_lists(quick)]
    deadline = time.perf_counter() + seconds
    tried = set()
    for number, (shapes, first) in enumerate(tasks):
        found = lists.get(shapes.key)
        entries = found["candidates"] if found else {}
        # What failed in an earlier run may work now (its library is here): after the others.
        wanted = [
            n
            for n in names(shapes, device, quick, first)
            if not done(entries.get(n, {})) and (shapes.key, n) not in tried
            if key or not first or not failed(entries.get(n, {}))
        ]
        left = deadline - time.perf_counter()
        if not wanted or (number and left < 5):
            continue
        tried |= {(shapes.key, n) for n in wanted}
        skip = [n for n in names(shapes, device, quick, False) if n not in wanted]
        share = max(5.0, left / (len(tasks) - number))

        def keep(known: List, key: str = shapes.key) -> None:
            lists[key] = known
            save(lists)

        run_list(shapes, device, quick, share, found, skip, keep)


def not_measured(lists: dict[str, List], device: str, quick: bool, key: bool) -> list[str]:
    """A line for each candidate that was not timed, with the reason."""
    lines = []
    for shapes in shape_lists(quick):
        entries = lists.get(shapes.key, {}).get("candidates", {})
        missing = [n for n in names(shapes, device, quick, key) if not timed(entries.get(n, {}))]
        for name in missing:
            why = entries.get(name, {}).get("error", "not run: no time left")
            lines.append(f"{shapes.key}: {name}: {why.removeprefix('TimeoutError: ')}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"], help="where (cuda)")
    parser.add_argument("--quick", action="store_true", help="tiny lists, no other libraries")
    parser.add_argument("--key", action="store_true", help="only what decides the most")
    parser.add_argument("--again", action="store_true", help="measure what is known again, too")
    parser.add_argument("--seconds", type=float, default=400.0, help="for all of it (400)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    device, quick, key = arguments.device, arguments.quick, arguments.key
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here; --device cpu --quick tries the code")
    found = environment(device, quick)
    path = arguments.out / gpu_results.file_name(found["gpu"])
    content = gpu_results.begin(path, found)
    gpu_results.update(path, {"build": amp.build_info()})
    gpu = found["gpu"] or "cpu"
    print(f"{gpu}, torch {torch.__version__}, amp_mp {amp.build_info()}", flush=True)
    lists: dict[str, List] = {} if arguments.again else content.get("lists", {})

    def save(lists: dict[str, List]) -> None:
        met = gpu_report.as_dicts(gpu_report.targets(lists))
        gpu_results.update(path, {"lists": lists, "targets": met})

    benchmark(lists, device, quick, key, arguments.seconds, save)
    missing = not_measured(lists, device, quick, False)
    save(lists)
    gpu_results.update(path, {"not_measured": missing})
    print("== tables")
    print("\n".join(map(gpu_report.list_table, lists.values())))
    print("\n".join(["== not measured", *missing] if missing else []))
    try:
        gpu_report.picture(lists, gpu, path.with_suffix(".png"))
    except ImportError as error:
        print(f"no picture: {error}")
    print("== targets")
    print(gpu_report.verdict_table(gpu_report.targets(lists)))


if __name__ == "__main__":
    main()
