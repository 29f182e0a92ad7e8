"""Makes a folder with the other libraries of gpu_peers.py, for a machine without network.

    python benchmarks/gpu/gpu_peers_folder.py                            # build/peers
    python benchmarks/gpu/gpu_peers_folder.py --cuda 12.8 --python 3.11 --folder /tmp/peers

Wheels for Linux on x86-64 come from the package index, by pip, without what they depend on (torch,
triton, numpy, packaging). Of bitsandbytes the one native library for that CUDA is kept. gpu.sh uses
build/peers where it is; of another folder PYTHONPATH tells it. Exit status 1 where a wheel is
missing, has no library for that CUDA, or all of them are more than 60 MB.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("flashoptim", "torch-optimi", "bitsandbytes", "torchao")
MOST_MB = 60
GLIBC = ("2_17", "2_24", "2_28", "2_34")


def download(wheels: Path, python: str, names: tuple[str, ...] = PEERS) -> None:
    """The newest wheels, into the folder `wheels`; pip says what it does not find."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    command += [str(wheels), "--only-binary=:all:", "--python-version", python]
    command += ["--implementation", "cp"]
    for abi in (f"cp{python.replace('.', '')}", "abi3", "none"):
        command += ["--abi", abi]
    for glibc in GLIBC:
        command += ["--platform", f"manylinux_{glibc}_x86_64"]
    command += ["--platform", "manylinux2014_x86_64"]
    if subprocess.run([*command, *names]).returncode != 0:
        raise SystemExit(f"pip found no wheels of {', '.join(names)} for Python {python}")


def unpack(wheel: Path, folder: Path, cuda: str) -> int:
    """Unpacks what a GPU of NVIDIA's with that CUDA can use; returns its bytes."""
    wanted = f"libbitsandbytes_cuda{cuda.replace('.', '')}.so"
    size, native = 0, []
    with zipfile.ZipFile(wheel) as packed:
        for entry in packed.infolist():
            name = Path(entry.filename).name
            if re.fullmatch(r"libbitsandbytes_\w+\.so", name):
                native.append(name)
                if name != wanted:
                    continue
            if entry.filename.startswith(("test/", "tests/")):  # would hide others' of that name
                continue
            packed.extract(entry, folder)
            size += entry.file_size
    if native and wanted not in native:
        raise SystemExit(f"{wheel.name} has no {wanted}, but {', '.join(sorted(native))}")
    return size


def make(wheels: Path, folder: Path, cuda: str) -> list[str]:
    """Replaces the folder by what the wheels have in them; a line for each, and one for all."""
    with tempfile.TemporaryDirectory() as made:
        lines, whole = [], 0
        for wheel in sorted(wheels.glob("*.whl")):
            size = unpack(wheel, Path(made), cuda)
            whole += size
            name, version, *_ = wheel.name.split("-")
            lines.append(f"{name.replace('_', '-'):<14}{version:<10}{size / 1e6:6.1f} MB")
        if whole > MOST_MB * 1e6:
            found = "\n".join(lines)
            raise SystemExit(f"{found}\nall: {whole / 1e6:.1f} MB, more than {MOST_MB} MB")
        if folder.exists():
            shutil.rmtree(folder)
        shutil.copytree(made, folder)
    return [*lines, f"{folder}: {whole / 1e6:.1f} MB, for CUDA {cuda}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", default="13.0", help="of torch on that machine (13.0)")
    parser.add_argument("--python", default="3.12", help="of that machine (3.12)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/peers", help="build/peers")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as wheels:
        download(Path(wheels), arguments.python)
        print("\n".join(make(Path(wheels), arguments.folder, arguments.cuda)))


if __name__ == "__main__":
    main()
