"""The end of `make gpu`: what became of every part, into the results' JSON and onto the screen.

    python benchmarks/gpu/gpu_summary.py build/gpu benchmarks/results --out FOLDER

Exit status 1 if a part failed. A sanitizer that the machine refuses has not failed, nor has a part
for which there was no time; a missed target is told, and fails nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOG_BYTES = 4_000_000  # of each log, its end
REFUSED = re.compile(r"Device not supported|not supported on this (device|system)", re.IGNORECASE)
SANITIZERS = ("memcheck", "racecheck")


@dataclass(frozen=True)
class Part:
    """One part of gpu.sh: its seconds and how it ended, in words."""

    name: str
    seconds: int
    outcome: str

    @property
    def failed(self) -> bool:
        return self.outcome.startswith("FAILED")


def outcome(name: str, status: str, log: str) -> str:
    """An exit status in words; status may be a word of gpu.sh's own."""
    if status == "skipped":
        return "not run: no time left"
    if status == "absent":
        return "not run: compute-sanitizer is not here"
    if name in SANITIZERS and REFUSED.search(log):
        return "refused by this machine"
    if status == "0":
        return "passed"
    if status in ("124", "137"):
        return "FAILED: stopped, it took too long"
    if name in SANITIZERS and status == "9":
        return "FAILED: found errors"
    return f"FAILED: exit status {status}"


def read(path: Path) -> str:
    """The end of a log; nothing of one that is not there."""
    if not path.exists():
        return ""
    return path.read_bytes()[-LOG_BYTES:].decode(errors="replace")


def parts_of(logs: Path) -> list[Part]:
    """From parts.tsv: name, seconds, exit status."""
    rows = [line.split("\t") for line in read(logs / "parts.tsv").splitlines()]
    return [
        Part(name, int(seconds), outcome(name, status, read(logs / f"{name}.log")))
        for name, seconds, status in rows
    ]


def suite(log: str) -> dict[str, Any] | None:
    """pytest's last line and the tests that failed; None where it did not get to its end."""
    lines = log.splitlines()
    ends = [
        line.strip("= ") for line in lines if re.search(r"\d (passed|failed|error).* in ", line)
    ]
    failed = [
        line.partition(" ")[2].split(" - ")[0]
        for line in lines
        if line.startswith(("FAILED ", "ERROR "))
    ]
    return {"counts": ends[-1], "failures": failed[:100]} if ends else None


def results_of(logs: Path, results: Path) -> tuple[Path, dict[str, Any]]:
    """The benchmark's file and content; without one, a new file named after the GPU."""
    written = re.findall(r"^written to (.+)$", read(logs / "benchmark.log"), re.MULTILINE)
    if written and Path(written[-1]).exists():
        path = Path(written[-1])
        return path, json.loads(path.read_text())
    gpu = read(logs / "environment.log").partition(",")[0].strip()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", gpu.partition("\n")[0])[:60] or "unknown"
    return results / f"{name}-incomplete.json", {}


def merged(logs: Path, parts: list[Part], content: dict[str, Any]) -> dict[str, Any]:
    """The content with the parts', the suites' and the waits' outcomes."""
    waits = read(logs / "host_waits.json")
    return {
        **content,
        "environment": read(logs / "environment.log").splitlines(),
        "parts": {p.name: {"seconds": p.seconds, "outcome": p.outcome} for p in parts},
        "suites": {
            name: found
            for name in ("cuda_tests", "other_tests")
            if (found := suite(read(logs / f"{name}.log"))) is not None
        },
        "host_waits": json.loads(waits) if waits else None,
    }


def failure(part: Part, logs: Path, content: dict[str, Any], lines: int = 12) -> str:
    """What failed: names of tests, or the end of the log."""
    bad = content["suites"].get(part.name, {}).get("failures", [])
    end = bad[:lines] or read(logs / f"{part.name}.log").splitlines()[-lines:]
    lost = read(logs / "lost_device.log").splitlines()[-lines:] if "tests" in part.name else []
    return "\n".join([f"-- {part.name}", *(line[:160] for line in [*end, *lost])])


def verdict(content: dict[str, Any]) -> list[str]:
    """The targets, and the tests and waits in one line each."""
    lines = [
        f"{t['what']:<46}{t['wanted']:>9}{t['found']:>9}  {t['verdict']}".rstrip()
        for t in content.get("targets", [])
    ]
    for name, found in content["suites"].items():
        lines.append(f"{name}: {found['counts']}")
    if content["host_waits"]:
        worst = max(max(c["waits"], c["to_host"]) for c in content["host_waits"].values())
        launches = max(c["launches"] for c in content["host_waits"].values())
        lines.append(f"host waits in a training step: {worst}, of {launches} launches at most")
    return lines


def copy_out(out: Path, logs: Path, json_path: Path) -> None:
    """At most three files: figures, picture, all logs in one."""
    out.mkdir(parents=True, exist_ok=True)
    for path in (json_path, json_path.with_suffix(".png")):
        if path.exists():
            shutil.copy(path, out / path.name)
    whole = "".join(f"==== {p.name}\n{read(p)[-1_500_000:]}\n" for p in sorted(logs.glob("*.log")))
    (out / "gpu.log").write_text(whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", type=Path, help="where gpu.sh left logs and parts.tsv")
    parser.add_argument("results", type=Path, help="folder of the results")
    parser.add_argument("--out", type=Path, help="copy results and logs there too")
    arguments = parser.parse_args()
    parts = parts_of(arguments.logs)
    path, content = results_of(arguments.logs, arguments.results)
    content = merged(arguments.logs, parts, content)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    if arguments.out:
        copy_out(arguments.out, arguments.logs, path)
    tables = read(arguments.logs / "benchmark.log").partition("== targets")[0].splitlines()
    print("\n".join(line for line in tables if not line.startswith("written to")))
    for part in parts:
        if part.failed:
            print(failure(part, arguments.logs, content))
    print("== parts")
    for part in parts:
        print(f"{part.name:<14}{part.seconds:4d} s  {part.outcome}")
    print("== verdict")
    print("\n".join(verdict(content)))
    print(f"written to {path}")
    raise SystemExit(any(part.failed for part in parts) or not parts)


if __name__ == "__main__":
    main()
