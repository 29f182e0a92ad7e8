"""gpu_summary.py: how steps ended, in words; what is added to the results and what stays there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_summary
import pytest
from gpu_summary import Part


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """gpu.sh's folder, with a file of results."""
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"commit": "abc", "lists": {"one": {}}}))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/environment.json").write_text(json.dumps({"results": str(results)}))
    return tmp_path / "logs"


def results(logs: Path) -> dict[str, Any]:
    return dict(json.loads((logs.parent / "results.json").read_text()))


def test_every_step_is_added_when_it_ends(logs: Path) -> None:
    gpu_summary.plan(logs, ["bits", "bench"])
    (logs / "bits.log").write_text("== 2 passed in 1.00s ==\n")
    gpu_summary.record(logs, Part("bits", 3, "passed"))
    found = results(logs)
    assert found["lists"] == {"one": {}}
    assert found["left"] == ["bench"]
    assert found["parts"] == {"bits": {"seconds": 3, "outcome": "passed"}}
    assert found["suites"] == {"bits": {"counts": "2 passed in 1.00s", "failures": []}}


def test_a_suite_that_does_not_end_leaves_no_older_counts(logs: Path) -> None:
    (logs / "bits.log").write_text("== 2 passed in 1.00s ==\n")
    gpu_summary.record(logs, Part("bits", 3, "passed"))
    (logs / "bits.log").write_text("..F\n")
    gpu_summary.record(logs, Part("bits", 90, "FAILED: stopped, it took too long"))
    assert results(logs)["suites"] == {}
    assert results(logs)["parts"]["bits"]["outcome"] == "FAILED: stopped, it took too long"


def test_a_step_that_did_not_run_leaves_what_is_known(logs: Path) -> None:
    (logs / "bits.log").write_text("== 2 passed in 1.00s ==\n")
    gpu_summary.record(logs, Part("bits", 3, "passed"))
    before = results(logs)
    gpu_summary.plan(logs, ["bits"])
    gpu_summary.record(logs, Part("bits", 0, "not run: no time left"))
    assert results(logs) == {**before, "left": ["bits"]}


@pytest.mark.parametrize("launches", [3, 4])
def test_waits_and_launches_are_told(
    logs: Path, capsys: pytest.CaptureFixture[str], launches: int
) -> None:
    counts = {"launches": 30, "waits": 0, "to_host": 1, "step_launches": launches}
    (logs / "host_waits.json").write_text(json.dumps({"bfloat16 exact": counts}))
    gpu_summary.record(logs, Part("host_waits", 3, "FAILED: exit status 1"))
    assert results(logs)["host_waits"] == {"bfloat16 exact": counts}
    assert gpu_summary.finish(logs)
    printed = capsys.readouterr().out
    assert "host waits in a training step: 1" in printed
    assert f"launches of step and update: {launches} at most" in printed
    assert "commit abc, written to" in printed


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
