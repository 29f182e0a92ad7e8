"""make gpu and its parts, as a user calls them: a bare copy of the tree, tools that pretend."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_machine import ROOT, Machine

pytestmark = [pytest.mark.full, pytest.mark.slow]

SANITIZER = """#!/bin/bash
[ "$2" = memcheck ] && { echo "========= Error: Device not supported."; exit 1; }
echo "========= ERROR SUMMARY: 1 error"; exit 9
"""
BITS_DIFFER = {"-k cuda tests/optim": "echo 'E   bits differ'; exit 1"}
ORDER = ["build", "bits", "host_waits", "bench_key", "cuda_tests", "bench"]
ORDER += ["memcheck", "racecheck", "other_tests"]


def outcomes(machine: Machine) -> dict[str, str]:
    return {name: part["outcome"] for name, part in machine.results["parts"].items()}


def test_make_gpu_goes_through_every_step_and_says_what_became_of_it(tmp_path: Path) -> None:
    table = "echo '== tables'; echo 'flashoptim, a line'; echo '== targets'; echo 'fast, again'"
    machine = Machine(tmp_path, {**BITS_DIFFER, "gpu_step.py": table})
    machine.tool("compute-sanitizer", SANITIZER)
    done = machine.make("gpu", OUT=str(tmp_path / "out"), AMP_MP_COMMIT="c0ffee")
    assert done.returncode != 0
    assert outcomes(machine) == {
        "build": "passed",
        "bits": "FAILED: exit status 1",
        "host_waits": "passed",
        "bench_key": "passed",
        "cuda_tests": "passed",
        "bench": "passed",
        "memcheck": "refused by this machine",
        "racecheck": "FAILED: found errors",
        "other_tests": "passed",
    }
    assert list(outcomes(machine)) == ORDER  # what decides the most first
    assert machine.results["left"] == []
    assert machine.results["commit"] == "c0ffee"
    assert machine.results["suites"]["cuda_tests"]["counts"] == "3 passed in 0.10s"
    printed = done.stdout
    assert "-- bits\nE   bits differ" in printed
    assert "flashoptim, a line" in printed
    assert "fast, again" not in printed
    assert printed.index("== parts") < printed.index("== verdict") < printed.index("c0ffee")
    copied = {path.name for path in (tmp_path / "out").iterdir()}
    assert copied == {"Made-Up-9000.json", "gpu.log"}


@pytest.mark.parametrize(
    ("target", "steps"),
    [
        ("gpu-tests", ["build", "bits", "host_waits", "cuda_tests", "other_tests"]),
        ("gpu-bench", ["build", "bench"]),
        ("gpu-sanitize", ["build", "memcheck", "racecheck"]),
    ],
)
def test_a_part_can_be_called_alone(tmp_path: Path, target: str, steps: list[str]) -> None:
    machine = Machine(tmp_path, {})
    machine.tool("compute-sanitizer", '#!/bin/bash\nexec "${@:5}"\n')
    done = machine.make(target)
    assert done.returncode == 0, done.stdout + done.stderr
    assert outcomes(machine) == dict.fromkeys(steps, "passed")
    limits = [int(line.split()[-2]) for line in done.stdout.splitlines() if "at most" in line]
    assert len(limits) == len(steps)
    assert max(limits) <= 540


def test_the_parts_have_the_time_that_is_promised(tmp_path: Path) -> None:
    """Even where the build takes all its time: 80 s for each of 4 lists, 175 s for each tool."""
    script = (ROOT / "benchmarks/gpu/gpu.sh").read_text()
    machine = Machine(tmp_path, {})
    machine.tool("compute-sanitizer", '#!/bin/bash\nexec "${@:5}"\n')
    assert "build=180  #" in script
    assert set(re.findall(r"(?:tests|bench|sanitize)\) total=(\d+)", script)) == {"530", "540"}
    bench = machine.make("gpu-bench", GPU_SECONDS=str(540 - 180))
    assert bench.returncode == 0
    (call,) = machine.called("gpu_step.py")
    assert int(call.split("--seconds ")[1].split()[0]) == 540 - 180 - 20
    sanitize = machine.make("gpu-sanitize", GPU_SECONDS=str(540 - 180))
    assert sanitize.stdout.count("at most 175 s") == 2


@pytest.mark.parametrize("part", ["tests", "bench", "sanitize"])
def test_without_make_the_script_is_called(tmp_path: Path, part: str) -> None:
    """bash benchmarks/gpu/gpu.sh PART, from any folder"""
    machine = Machine(tmp_path, {})
    machine.tool("compute-sanitizer", '#!/bin/bash\nexec "${@:5}"\n')
    machine.tool("make", "#!/bin/bash\nexit 127\n")
    done = machine.run(["bash", str(machine.tree / "benchmarks/gpu/gpu.sh"), part])
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(outcomes(machine).values()) == {"passed"}


def test_git_leaves_the_results_alone() -> None:
    """Else a copy of the tree without untracked files has lost what an earlier call measured."""
    assert "/benchmarks/results/" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_callers_wheels_are_found(tmp_path: Path) -> None:
    """PYTHONPATH=/my/wheels:more make gpu-bench"""
    machine = Machine(tmp_path, {})
    assert machine.make("gpu-bench", PYTHONPATH="/my/wheels:more").returncode == 0
    (call,) = machine.called("gpu_step.py")
    paths = call.partition("|")[0].split(":")
    assert paths[0] == str(machine.tree / "python")
    assert paths[-2:] == ["/my/wheels", str(machine.tree / "more")]
    machine.calls.unlink()
    assert machine.make("gpu-bench").returncode == 0  # and without any
    (call,) = machine.called("gpu_step.py")
    assert len(call.partition("|")[0].split(":")) == 2
    machine.calls.unlink()
    (machine.tree / "build/peers").mkdir()
    assert machine.make("gpu-bench").returncode == 0  # and with what make gpu-peers has made
    (call,) = machine.called("gpu_step.py")
    assert call.partition("|")[0].split(":")[2:] == [str(machine.tree / "build/peers")]


def test_pytests_plugins_are_not_needed(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {"import pytest_timeout": "exit 1", "import xdist": "exit 1"})
    assert machine.make("gpu-tests").returncode == 0
    without = machine.called("-m pytest")
    assert all("timeout" not in call and " -n " not in call for call in without)
    assert all("-o addopts=-ra --strict-markers" in call for call in without)
    machine = Machine(tmp_path / "with", {"import pytest_timeout": "exit 0", "import xdist": ""})
    assert machine.make("gpu-tests").returncode == 0
    with_them = machine.called("-m pytest")
    assert len(with_them) == len(without) == 3
    assert all("--timeout=90" in call and " -n " in call for call in with_them)


def test_what_there_was_no_time_for_is_told(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {"gpu_build.py": f"echo 96 >'{tmp_path}/clock'"})
    done = machine.make("gpu-tests", GPU_SECONDS="100")
    names = ["bits", "host_waits", "cuda_tests", "other_tests"]
    assert outcomes(machine) == {"build": "passed", **dict.fromkeys(names, "not run: no time left")}
    assert machine.results["left"] == names
    assert done.stdout.count("not run: no time left") == 4
    machine = Machine(tmp_path / "more", {"gpu_build.py": f"echo 95 >'{tmp_path}/more/clock'"})
    assert "== bits, at most 5 s" in machine.make("gpu-tests", GPU_SECONDS="100").stdout


def test_a_step_that_hangs_is_stopped_and_the_next_one_runs(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {})
    stop = '#!/bin/bash\ncase "$*" in *gpu_syncs*) exit 124 ;; *) exec "${@:3}" ;; esac\n'
    machine.tool("timeout", stop)
    assert machine.make("gpu-tests").returncode != 0
    assert outcomes(machine)["host_waits"] == "FAILED: stopped, it took too long"
    assert outcomes(machine)["cuda_tests"] == "passed"


def test_a_call_that_is_killed_leaves_what_it_knew(tmp_path: Path) -> None:
    kill = 'kill -9 "$(ps -o ppid= -p "$PPID" | tr -d " ")"; kill -9 "$PPID"'
    machine = Machine(tmp_path, {"gpu_syncs.py": kill})
    out = tmp_path / "out"
    assert machine.make("gpu-tests", OUT=str(out)).returncode != 0
    assert outcomes(machine) == {"build": "passed", "bits": "passed"}
    assert machine.results["left"] == ["host_waits", "cuda_tests", "other_tests"]
    assert json.loads((out / "Made-Up-9000.json").read_text()) == machine.results
    assert "==== bits.log\n== 3 passed" in (out / "gpu.log").read_text()


def test_a_call_that_is_interrupted_says_what_it_knows(tmp_path: Path) -> None:
    stop = 'kill "$(ps -o ppid= -p "$PPID" | tr -d " ")"; exec sleep 100'
    machine = Machine(tmp_path, {"gpu_syncs.py": stop})
    done = machine.make("gpu-tests", OUT=str(tmp_path / "out"))
    assert done.returncode != 0
    assert done.stdout.count("not done: the call ended before it") == 3
    copied = json.loads((tmp_path / "out/Made-Up-9000.json").read_text())
    assert copied["left"] == ["host_waits", "cuda_tests", "other_tests"]


def test_a_failed_build_ends_the_call_and_says_what_was_not_done(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {"gpu_build.py": "echo 'nvcc: no such flag'; exit 1"})
    done = machine.make("gpu-bench")
    assert done.returncode != 0
    assert "nvcc: no such flag" in done.stdout
    assert "bench                 not done" in done.stdout
    assert outcomes(machine) == {"build": "FAILED: exit status 1"}


def test_parts_add_to_one_file_and_repeated_ones_replace_their_own(tmp_path: Path) -> None:
    machine = Machine(tmp_path, BITS_DIFFER)
    machine.make("gpu-tests")
    assert outcomes(machine)["bits"] == "FAILED: exit status 1"
    machine.make("gpu-bench")
    assert outcomes(machine).keys() >= {"bits", "bench"}
    again = Machine(tmp_path / "again", {})
    shutil.rmtree(again.tree)
    shutil.copytree(machine.tree, again.tree)
    again.make("gpu-tests")
    assert set(outcomes(again).values()) == {"passed"}
    again.make("gpu-tests", GPU_SECONDS="4")  # no time for anything: what is known stays
    assert set(outcomes(again).values()) == {"passed"}


@pytest.mark.parametrize(
    ("part", "seconds", "message"),
    [
        ("everything", "9", "expected tests, bench, sanitize or nothing, found everything"),
        ("bench", "9 min", "GPU_SECONDS: expected whole seconds, found 9 min"),
    ],
)
def test_wrong_words_are_refused(part: str, seconds: str, message: str) -> None:
    command = ["bash", str(ROOT / "benchmarks/gpu/gpu.sh"), part]
    environment = {**os.environ, "GPU_SECONDS": seconds}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr


def test_figures_are_measured_again_on_demand(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {})
    machine.make("gpu-bench")
    machine.make("gpu-bench", AGAIN="1")
    machine.make("gpu", AGAIN="1")
    again = ["--again" in call for call in machine.called("gpu_step.py")]
    assert again == [False, True, True, False]  # make gpu: first the deciding ones, then the rest


def test_without_a_gpu_make_gpu_ends_at_once() -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(ROOT / "benchmarks/gpu/gpu.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "torch finds no GPU here" in done.stderr
