"""What becomes of the steps of `make gpu`: into the results' JSON after each, and onto the screen.

    python benchmarks/gpu/gpu_summary.py build/gpu plan build bits bench
    python benchmarks/gpu/gpu_summary.py build/gpu record bits 34 0
    python benchmarks/gpu/gpu_summary.py build/gpu --out FOLDER finish

The folder is where gpu.sh leaves logs and environment.json. The JSON's "left" lists the steps of
the latest call that have not ended, the running one first; a call that is killed leaves them there.
With --out each of the three copies results and logs there.
finish has exit status 1 if a step failed. A sanitizer that the machine refuses has not failed, nor
has a step for which there was no time; a missed target is told, and fails nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_results

LOG_BYTES = 4_000_000  # of each log, its end
REFUSED = re.compile(r"Device not supported|not supported on this (device|system)", re.IGNORECASE)
SANITIZERS = ("memcheck", "racecheck")
BENCHMARKS = ("bench", "bench_key")


@dataclass(frozen=True)
class Part:
    """One step of gpu.sh: its seconds and how it ended, in words."""

    name: str
    seconds: int
    outcome: str

    @property
    def failed(self) -> bool:
        return self.outcome.startswith("FAILED")

    @property
    def ran(self) -> bool:
        return not self.outcome.startswith("not run")


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


def results_of(logs: Path) -> Path:
    """The file of the results."""
    return Path(json.loads((logs / "environment.json").read_text())["results"])


def plan(logs: Path, names: list[str]) -> None:
    """Notes the steps to come."""
    gpu_results.update(results_of(logs), {"left": names})


def record(logs: Path, part: Part) -> None:
    """Notes how a step has ended, with what it found. One not run leaves an earlier outcome."""
    path = results_of(logs)
    content = gpu_results.load(path)
    with (logs / "parts.tsv").open("a") as file:
        file.write(f"{part.name}\t{part.seconds}\t{part.outcome}\n")
    if part.ran:
        content["left"] = [name for name in content.get("left", []) if name != part.name]
    earlier = content.setdefault("parts", {})
    if part.ran or part.name not in earlier:
        earlier[part.name] = {"seconds": part.seconds, "outcome": part.outcome}
    log = read(logs / f"{part.name}.log")
    if part.ran and part.name not in (*BENCHMARKS, "build", "host_waits"):
        content.setdefault("suites", {}).pop(part.name, None)
        if found := suite(log):
            content["suites"][part.name] = found
    waits = logs / "host_waits.json"
    if part.name == "host_waits" and part.ran and waits.exists():
        content["host_waits"] = json.loads(waits.read_text())
        waits.unlink()  # the next call's are its own
    gpu_results.save(path, content)


def parts_of(logs: Path) -> list[Part]:
    """Of this call, from parts.tsv: name, seconds, outcome."""
    rows = [line.split("\t") for line in read(logs / "parts.tsv").splitlines()]
    return [Part(name, int(seconds), outcome) for name, seconds, outcome in rows]


def failure(part: Part, logs: Path, content: dict[str, Any], lines: int = 12) -> str:
    """What failed: names of tests, or the end of the log."""
    bad = content.get("suites", {}).get(part.name, {}).get("failures", [])
    end = bad[:lines] or read(logs / f"{part.name}.log").splitlines()[-lines:]
    lost = read(logs / "lost_device.log").splitlines()[-lines:] if "tests" in part.name else []
    return "\n".join([f"-- {part.name}", *(line[:160] for line in [*end, *lost])])


def verdict(content: dict[str, Any]) -> list[str]:
    """The targets, and the tests and waits in one line each; at last what was not measured."""
    lines = [
        f"{t['what']:<46}{t['wanted']:>9}{t['found']:>9}  {t['verdict']}".rstrip()
        for t in content.get("targets", [])
    ]
    for name, found in content.get("suites", {}).items():
        lines.append(f"{name}: {found['counts']}")
    if content.get("host_waits"):
        counts = content["host_waits"].values()
        worst = max(max(c["waits"], c["to_host"]) for c in counts)
        launches = max(c["step_launches"] for c in counts)
        lines.append(f"host waits in a training step: {worst}")
        lines.append(f"launches of step and update: {launches} at most")
    lines += [f"not measured, {line}" for line in content.get("not_measured", [])]
    return lines


def copy_out(out: Path, logs: Path, json_path: Path) -> None:
    """At most three files: figures, picture, all logs in one."""
    out.mkdir(parents=True, exist_ok=True)
    for path in (json_path, json_path.with_suffix(".png")):
        if path.exists():
            shutil.copy(path, out / path.name)
    whole = "".join(f"==== {p.name}\n{read(p)[-1_500_000:]}\n" for p in sorted(logs.glob("*.log")))
    (out / "gpu.log").write_text(whole)


def finish(logs: Path) -> bool:
    """Prints what the call has found; whether a step failed or none ran."""
    path, parts = results_of(logs), parts_of(logs)
    content = gpu_results.load(path)
    ran = [part.name for part in parts if part.ran and part.name in BENCHMARKS]
    log = read(logs / f"{ran[-1]}.log") if ran else ""
    print(log.partition("== tables\n")[2].partition("== targets")[0])
    for part in parts:
        if part.failed:
            print(failure(part, logs, content))
    print("== parts")
    for part in parts:
        print(f"{part.name:<14}{part.seconds:4d} s  {part.outcome}")
    ended = {part.name for part in parts}
    for name in (name for name in content.get("left", []) if name not in ended):
        print(f"{name:<14}        not done: the call ended before it")
    print("== verdict")
    print("\n".join(verdict(content)))
    print(f"commit {content['commit'] or 'unknown'}, written to {path}")
    return any(part.failed for part in parts) or not parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", type=Path, help="where gpu.sh left logs and environment.json")
    parser.add_argument("--out", type=Path, help="copy results and logs there too")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("plan").add_argument("names", nargs="+", help="of the steps to come")
    recording = commands.add_parser("record")
    recording.add_argument("name", help="of the step that has ended")
    recording.add_argument("seconds", type=int, help="that it took")
    recording.add_argument("status", help="its exit status, or skipped, or absent")
    commands.add_parser("finish")
    arguments = parser.parse_args()
    logs: Path = arguments.logs
    failed = False
    if arguments.command == "plan":
        plan(logs, arguments.names)
    elif arguments.command == "record":
        name, status = arguments.name, arguments.status
        text = outcome(name, status, read(logs / f"{name}.log"))
        record(logs, Part(name, arguments.seconds, text))
    else:
        failed = finish(logs)
    if arguments.out:
        copy_out(arguments.out, logs, results_of(logs))
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
