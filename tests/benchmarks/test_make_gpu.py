"""make gpu where there is no GPU: every part is gone through, and told how it ended."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

import gpu_summary  # noqa: E402

# In place of python3: answers what gpu.sh asks, is a part that succeeds or fails, or Python.
PYTHON = """#!/bin/bash
case "$*" in
  *get_device_capability*) echo 9.0 ;;
  *gpu_summary.py*) exec {python} "$@" ;;
  *"-k cuda "*) echo "E   bits differ"; exit 1 ;;
  *gpu_step.py*) echo "written to $RESULTS"; echo "flashoptim, a line of the table"
    echo "== targets"; echo "fast, once more" ;;
  *) echo "$@" ;;
esac
"""
SANITIZER = """#!/bin/bash
[ "$2" = memcheck ] && { echo "========= Error: Device not supported."; exit 1; }
echo "========= ERROR SUMMARY: 1 error"; exit 9
"""


def test_make_gpu_goes_through_every_part_and_says_what_became_of_it(tmp_path: Path) -> None:
    tools = {
        "python3": PYTHON.format(python=sys.executable),
        "nvidia-smi": "#!/bin/bash\necho 'Made Up 9000, 580.1, 9.0, 81559 MiB'\n",
        "compute-sanitizer": SANITIZER,
    }
    (tmp_path / "bin").mkdir()
    for name, text in tools.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "benchmarks/gpu").mkdir(parents=True)
    for name in ("gpu.sh", "gpu_summary.py"):
        shutil.copy(ROOT / "benchmarks/gpu" / name, tmp_path / "benchmarks/gpu")
    results = tmp_path / "Made-Up-9000.json"
    targets = [{"what": "fast", "wanted": ">= 90%", "found": "95%", "verdict": "met"}]
    results.write_text(json.dumps({"commit": None, "targets": targets}))
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHON": "python3",
        "RESULTS": str(results),
        "OUT": str(tmp_path / "out"),
    }
    done = subprocess.run(
        ["bash", str(tmp_path / "benchmarks/gpu/gpu.sh")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    content = json.loads(results.read_text())
    assert {name: part["outcome"] for name, part in content["parts"].items()} == {
        "build": "passed",
        "cuda_tests": "FAILED: exit status 1",
        "host_waits": "passed",
        "benchmark": "passed",
        "memcheck": "refused by this machine",
        "racecheck": "FAILED: found errors",
        "other_tests": "passed",
    }
    assert content["environment"][0] == "Made Up 9000, 580.1, 9.0, 81559 MiB"
    printed = done.stdout
    assert "-- cuda_tests\nE   bits differ" in printed
    assert "flashoptim, a line of the table" in printed
    assert "fast, once more" not in printed
    assert printed.index("== parts") < printed.index("== verdict") < printed.index("fast")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {results.name, "gpu.log"}


@pytest.mark.slow
def test_without_a_gpu_make_gpu_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "benchmarks/gpu").mkdir(parents=True)
    for name in ("gpu.sh", "gpu_summary.py"):
        shutil.copy(ROOT / "benchmarks/gpu" / name, tmp_path / "benchmarks/gpu")
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(tmp_path / "benchmarks/gpu/gpu.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "torch finds no GPU here" in done.stderr


@pytest.mark.parametrize(
    ("name", "status", "log", "wanted"),
    [
        ("build", "0", "", "passed"),
        ("cuda_tests", "124", "", "FAILED: stopped, it took too long"),
        ("benchmark", "139", "", "FAILED: exit status 139"),
        ("racecheck", "9", "ERROR SUMMARY: 2 errors", "FAILED: found errors"),
        ("racecheck", "1", "Device not supported", "refused by this machine"),
        ("cuda_tests", "1", "Device not supported", "FAILED: exit status 1"),
        ("memcheck", "absent", "", "not run: compute-sanitizer is not here"),
        ("other_tests", "skipped", "", "not run: no time left"),
    ],
)
def test_exit_statuses_become_words(name: str, status: str, log: str, wanted: str) -> None:
    found = gpu_summary.outcome(name, status, log)
    assert found == wanted
    assert gpu_summary.Part(name, 1, found).failed == wanted.startswith("FAILED")


def test_a_suites_counts_and_failures_are_read() -> None:
    log = (
        "..F [100%]\nE   FAILED to be equal\n==== short test summary info ====\n"
        "FAILED tests/test_x.py::bad[cuda-a b] - assert 1 == 2\nERROR tests/test_y.py::worse\n"
        "==== 1 failed, 2 passed, 1 skipped, 1 error in 3.21s ====\n"
    )
    assert gpu_summary.suite(log) == {
        "counts": "1 failed, 2 passed, 1 skipped, 1 error in 3.21s",
        "failures": ["tests/test_x.py::bad[cuda-a b]", "tests/test_y.py::worse"],
    }
    assert gpu_summary.suite("..F [ 50%]\n") is None
