"""make gpu with the real build script and benchmark, without git, network and GPU."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_lists import shape_lists
from gpu_machine import ROOT, Machine
from pretend_gpu.build import build, why_unavailable

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.xdist_group("gpu_benchmark")]


def test_make_gpu_and_its_parts_work_in_a_bare_copy_and_share_one_build(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {}, whole=True)
    machine.tool("compute-sanitizer", '#!/bin/bash\nexec "${@:5}"\n')
    assert not (machine.tree / ".git").exists()
    (machine.tree / "COMMIT").write_text("c0ffee\n")
    whole = machine.make("gpu")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert "commit c0ffee" in whole.stdout
    assert "GB/s: copy" in whole.stdout
    content = machine.results
    assert content["commit"] == "c0ffee"
    assert content["left"] == content["not_measured"] == []
    assert {part["outcome"] for part in content["parts"].values()} == {"passed"}
    assert len(content["host_waits"]) == 10
    assert list(content["lists"]) == [shapes.key for shapes in shape_lists()]
    for found in content["lists"].values():
        assert all(e["ms"] > 0 and e["waits"] == 0 for e in found["candidates"].values())
    compiled = compilations(machine)
    assert compiled > 10

    for path in machine.tree.glob("csrc/**/*.*"):  # as in a new copy of the same tree
        os.utime(path)
    bench = machine.make("gpu-bench")
    assert bench.returncode == 0, bench.stdout + bench.stderr
    assert compilations(machine) == compiled
    assert machine.results["lists"] == content["lists"]  # nothing was missing

    with (machine.tree / "csrc/core/m8.h").open("a") as file:
        file.write("// changed\n")
    changed = machine.make("gpu-sanitize")
    assert "was of other code" in changed.stdout
    assert compilations(machine) > compiled
    asked = ("git rev-parse --show-toplevel", "git remote get-url origin")  # both may fail
    assert all(line.endswith(asked) for line in machine.forbidden)


def compilations(machine: Machine) -> int:
    return len(machine.called("nvcc")) + len(machine.called("g++"))


@pytest.mark.timeout(1200)  # the first one builds the pretend GPU
def test_every_step_finds_its_tests_and_the_sanitizers_subset_passes(tmp_path: Path) -> None:
    """With the tests of the tree on the pretend GPU: all are collected, the subset is run."""
    if reason := why_unavailable():
        pytest.skip(f"no pretend GPU: {reason}")
    build()
    paths = f"PATH='{os.environ['PATH']}' PYTHONPATH={ROOT}/python:{ROOT}/tests/support"
    tests = f'cd "{ROOT}" && {paths} AMP_MP_PRETEND_GPU=1 exec "{sys.executable}" "$@"'
    machine = Machine(tmp_path, {"-p no:xdist": tests, "-m pytest -q": f"{tests} --collect-only"})
    tool = '#!/bin/bash\necho "$@" >>"$(dirname "$0")/sanitized"\nexec "${@:5}"\n'
    machine.tool("compute-sanitizer", tool)
    whole = machine.make("gpu")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    found = machine.results
    assert {part["outcome"] for part in found["parts"].values()} == {"passed"}
    for name, least in (("memcheck", 30), ("racecheck", 30)):
        assert passed(found, name) >= least
    for name, least in (("bits", 500), ("cuda_tests", 3000), ("other_tests", 3000)):
        log = (machine.tree / f"build/gpu/{name}.log").read_text()
        counts = re.findall(r"(\d+)(?:/\d+)? tests collected", log)
        assert counts, log[-300:]
        assert int(counts[-1]) >= least
    asked = (tmp_path / "bin/sanitized").read_text().splitlines()
    assert [line.partition(" --error-exitcode 9 ")[0] for line in asked] == [
        "--tool memcheck",
        "--tool racecheck",
    ]


def passed(found: Any, name: str) -> int:
    return int(found["suites"][name]["counts"].partition(" passed")[0].split()[-1])
