"""A whole optimizer step on a GPU: amp_mp's, torch's, other libraries'; four lists of parameters.

First what the memory can do (copy, read, in place), then every candidate: time on the device, time
of the host, bytes by formula, share of the copy bandwidth, kernels and waits of a step. The figures
go to benchmarks/results/<gpu>.json and .png; the targets are printed last.

    python benchmarks/gpu/gpu_step.py
    python benchmarks/gpu/gpu_step.py --device cpu --quick    # the code, not the speed
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gpu_report
import torch
from gpu_lists import ShapeList, shape_lists
from gpu_worker import DEVICE_LOST

import amp_mp as amp

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
STALLED = 45  # seconds; more than a worker allows a candidate
PACKAGES = ("triton", "flashoptim", "torch-optimi", "bitsandbytes", "torchao", "numpy")


def command_output(*command: str) -> str | None:
    """What a command prints; None if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def commit() -> str | None:
    """Of the code that runs: git's, else AMP_MP_COMMIT's, else what the file COMMIT says."""
    file = HERE.parents[1] / "COMMIT"
    named = os.environ.get("AMP_MP_COMMIT") or (file.read_text() if file.exists() else "")
    return command_output("git", "rev-parse", "HEAD") or named.strip() or None


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(device: str) -> dict[str, Any]:
    """What has to be known to read the figures later."""
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "commit": commit(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "driver": command_output(*query) if device == "cuda" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "packages": {name: found for name in PACKAGES if (found := version(name))},
        "build": amp.build_info(),
    }


def run_worker(
    shapes: ShapeList, device: str, quick: bool, skip: list[str], seconds: float, path: Path
) -> tuple[int | None, str]:
    """One worker: its exit status, None if it hung, and the end of what it said.

    A kernel that never ends cannot be interrupted from within: a worker that has written nothing
    for STALLED seconds is killed.
    """
    command = [sys.executable, str(HERE / "gpu_worker.py"), shapes.key, "--device", device]
    command += ["--json", str(path), "--seconds", f"{seconds:.0f}", *(["--quick"] * quick)]
    command += ["--skip", *skip] if skip else []
    log = path.with_suffix(".log")
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as worker:
        started = time.time()
        while worker.poll() is None:
            time.sleep(0.2)
            heard = path.stat().st_mtime if path.exists() else started
            if time.time() - max(heard, started) > STALLED:
                worker.kill()
                return None, f"nothing happened for {STALLED} s"
    said = [line for line in log.read_text().splitlines() if line and line[:5] != "USDT:"]
    return worker.returncode, said[-1] if said else ""


def run_list(shapes: ShapeList, device: str, quick: bool, seconds: float) -> dict[str, Any]:
    """A list's figures, with a new worker after each candidate that has taken one along."""
    deadline = time.perf_counter() + seconds
    found: dict[str, Any] = {
        "title": shapes.title,
        "tensors": len(shapes.shapes),
        "elements": shapes.elements,
        "ceilings": {},
        "candidates": {},
    }
    skip: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(5):
            path = Path(folder, f"{number}.json")
            left = deadline - time.perf_counter()
            if number and left < 10:
                break
            status, said = run_worker(shapes, device, quick, skip, left, path)
            part = json.loads(path.read_text()) if path.exists() else {}
            found["ceilings"] |= part.get("ceilings", {})
            found["candidates"] |= part.get("candidates", {})
            if status == 0:
                return found
            culprit = part.get("running")
            if culprit is None:
                found["error"] = f"the process ended with status {status}: {said}"
                break
            entry = found["candidates"].setdefault(culprit, {})
            if status != DEVICE_LOST:
                entry["error"] = f"took its process along, status {status}: {said}"
            timed = [name for name, e in found["candidates"].items() if "ms" in e]
            skip = sorted({*skip, culprit, *timed})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"], help="where (cuda)")
    parser.add_argument("--quick", action="store_true", help="tiny lists, no other libraries")
    parser.add_argument("--seconds", type=float, default=150.0, help="for all of it (150)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here; --device cpu --quick tries the code")
    content = environment(arguments.device)
    gpu = content["gpu"] or "cpu"
    print(f"{gpu}, torch {torch.__version__}, amp_mp {amp.build_info()}", flush=True)
    lists: dict[str, Any] = {}
    every = shape_lists(arguments.quick)
    deadline = time.perf_counter() + arguments.seconds
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', gpu)}.json"
    for number, shapes in enumerate(every):
        share = max(10.0, (deadline - time.perf_counter()) / (len(every) - number))
        lists[shapes.key] = run_list(shapes, arguments.device, arguments.quick, share)
        print(gpu_report.list_table(lists[shapes.key]), flush=True)
        met = gpu_report.targets(lists)
        content |= {"lists": lists, "targets": gpu_report.as_dicts(met)}
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"written to {path}", flush=True)  # now already: what comes may take it all along
    try:
        gpu_report.picture(lists, gpu, path.with_suffix(".png"))
    except ImportError as error:
        print(f"no picture: {error}")
    print("== targets")
    print(gpu_report.verdict_table(met))


if __name__ == "__main__":
    main()
