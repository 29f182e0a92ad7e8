"""make gpu-peers: the folder of other libraries for a machine without network."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import gpu_peers_folder
import pytest

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
