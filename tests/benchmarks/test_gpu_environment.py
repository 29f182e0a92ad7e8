"""What make gpu writes beside its figures: code, libraries; and whose figures stay."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_build
import gpu_environment
import gpu_peers_folder
import gpu_results
import gpu_summary
import pytest
import torch
from gpu_summary import Part

# ---- code and libraries --------------------------------------------------------------------------


def test_the_digest_is_of_the_sources_content(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/x.cu").write_text("one")
    first = gpu_environment.digest(["a"], tmp_path)
    os.utime(tmp_path / "a/b/x.cu", (0, 0))
    (tmp_path / "a/notes.txt").write_text("")
    assert gpu_environment.digest(["a"], tmp_path) == first
    (tmp_path / "a/b/x.cu").write_text("two")
    assert gpu_environment.digest(["a"], tmp_path) != first
    assert gpu_environment.digest(["a/b/x.cu"], tmp_path) != first


def test_libraries_of_pythonpath_are_seen(tmp_path: Path) -> None:
    (tmp_path / "flashoptim").mkdir()
    (tmp_path / "flashoptim/__init__.py").write_text("")
    (tmp_path / "flashoptim-0.1.4.dist-info").mkdir()
    (tmp_path / "flashoptim-0.1.4.dist-info/METADATA").write_text(
        "Name: flashoptim\nVersion: 0.1.4"
    )
    code = "import gpu_environment as e; print(e.describe(e.environment('cpu')))"
    path = f"{gpu_environment.HERE}:{tmp_path}"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    peers, others = found.splitlines()[-2:]
    assert peers.startswith("peers: flashoptim 0.1.4; not here: torch-optimi, bitsandbytes")
    assert re.search(r"libraries: .*numpy [0-9]", others)


def test_clocks_are_asked_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/bash\n[ "$1" = --query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw ] &&\n'
        '[ "$2" = --id=GPU-abc ] && echo "1980, 2619, 45, [N/A]"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    named = SimpleNamespace(uuid="abc")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: named)
    assert gpu_environment.clocks() == {"sm_mhz": 1980.0, "memory_mhz": 2619.0, "celsius": 45.0}
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpu_environment.clocks() is None


def test_a_call_that_knows_no_commit_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_environment, "commit", lambda: None)
    arguments = ["x", "--device", "cpu", "--json", str(tmp_path / "e"), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match=r"AMP_MP_COMMIT=\$\(git rev-parse HEAD\)"):
        gpu_environment.main()
    assert list(tmp_path.iterdir()) == []


# ---- the file of the results ---------------------------------------------------------------------

IDENTITY = dict.fromkeys(gpu_results.IDENTITY, "same")


def test_results_go_on_where_the_code_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "folder/gpu.json"
    gpu_results.begin(path, {**IDENTITY, "commit": "1"})
    gpu_results.update(path, {"lists": {"one": {}}})
    content = gpu_results.begin(path, {**IDENTITY, "commit": "2"})  # another commit, same code
    assert (content["commit"], content["lists"]) == ("2", {"one": {}})
    assert [p.name for p in path.parent.iterdir()] == ["gpu.json"]


@pytest.mark.parametrize("key", gpu_results.IDENTITY)
def test_results_of_anything_else_are_put_aside(
    tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.json"
    for number in range(3):
        gpu_results.begin(path, {**IDENTITY, "commit": "abc", key: number})
        gpu_results.update(path, {"figure": number})
    assert json.loads(path.read_text())["figure"] == 2
    assert json.loads((tmp_path / "gpu-abc.json").read_text())["figure"] == 0
    assert json.loads((tmp_path / "gpu-abc-2.json").read_text())["figure"] == 1
    assert "it is gpu-abc-2.json now" in capsys.readouterr().out


def test_a_broken_file_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text('{"commit": "a')
    assert gpu_results.begin(path, {**IDENTITY, "commit": None})["commit"] is None
    assert (tmp_path / "gpu-broken.json").read_text() == '{"commit": "a'


# ---- the build -----------------------------------------------------------------------------------


def test_a_library_is_built_for_this_gpu_or_for_what_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: dict[str, Any] = {"capability": "9.0"}
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert gpu_build.architectures(found) == "9.0"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    assert gpu_build.architectures(found) == "8.0"
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    with pytest.raises(SystemExit, match="name architectures in TORCH_CUDA_ARCH_LIST"):
        gpu_build.architectures({"capability": None})


PIP = "-m pip download --quiet --no-deps"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """Of a library in Python, and of one with native libraries for several CUDAs."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "torch_optimi-0.3.3-py3-none-any.whl", "w") as wheel:
        wheel.writestr("optimi/__init__.py", "")
        wheel.writestr("torch_optimi-0.3.3.dist-info/METADATA", "Name: torch-optimi\n")
        wheel.writestr("test/__init__.py", "raise ImportError")
    name = "bitsandbytes-0.50.2-py3-none-manylinux_2_24_x86_64.whl"
    with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("bitsandbytes/__init__.py", "")
        for kind in ("cuda118", "cuda128", "cuda130", "rocm72", "cpu"):
            wheel.writestr(f"bitsandbytes/libbitsandbytes_{kind}.so", bytes(30_000_000))
    return folder


def test_one_native_library_is_kept(wheels: Path, tmp_path: Path) -> None:
    folder = tmp_path / "peers"
    folder.mkdir()
    (folder / "of an earlier call").touch()
    lines = gpu_peers_folder.make(wheels, folder, "13.0")
    found = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert found == {
        "optimi/__init__.py",
        "torch_optimi-0.3.3.dist-info/METADATA",
        "bitsandbytes/__init__.py",
        "bitsandbytes/libbitsandbytes_cuda130.so",
    }
    assert lines[0].split() == ["bitsandbytes", "0.50.2", "30.0", "MB"]
    assert lines[1].split() == ["torch-optimi", "0.3.3", "0.0", "MB"]
    assert lines[2] == f"{folder}: 30.0 MB, for CUDA 13.0"


def test_what_cannot_be_carried_is_refused(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "peers"
    with pytest.raises(SystemExit, match=r"no libbitsandbytes_cuda124.so, but .*_cuda118.so, "):
        gpu_peers_folder.make(wheels, folder, "12.4")
    monkeypatch.setattr(gpu_peers_folder, "MOST_MB", 29)
    with pytest.raises(SystemExit, match=r"all: 30.0 MB, more than 29 MB"):
        gpu_peers_folder.make(wheels, folder, "13.0")
    assert not folder.exists()


def test_pip_is_asked_for_that_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit, match=r"pip found no wheels of flashoptim, .* for Python 3.11"):
        gpu_peers_folder.download(tmp_path, "3.11")
    (command,) = asked
    assert command[0] == sys.executable
    text = " ".join(command)
    assert PIP in text
    assert "--abi cp311" in text
    assert text.endswith("flashoptim torch-optimi bitsandbytes torchao")


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
