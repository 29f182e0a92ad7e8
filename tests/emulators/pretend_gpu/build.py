"""Builds amp_mp._C a second time: kernels that run on the CPU, and the pretend GPU to run them on.

One library holds two modules: `_C` as in build_tools/native.py but with `AMP_MP_WITH_CUDA`, and
`amp_mp_pretend_gpu`, which is what tests see of the device.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

HERE = Path(__file__).resolve().parent
SHIM = HERE.parent / "cuda_on_cpu"
ROOT = HERE.parents[2]
CSRC = ROOT / "csrc"
OUT = ROOT / "build/pretend_gpu"
CUDA = "13.0"  # the version that torch is to name

# The arithmetic of build_tools/native.py. Little is optimised: compiling takes longer than running.
FLAGS = [
    *("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-fopenmp", "-g0", "-Wall", "-Wextra"),
    *("-ffp-contract=off", "-fno-math-errno", f"-I{CSRC}", f"-I{SHIM}"),
]


def why_unavailable() -> str | None:
    """The reason why the library cannot be built here, or None if it can."""
    return None if shutil.which("g++") else "no g++"


def build() -> Path:
    """Compile what is older than its sources; returns the library.

    Raises:
        RuntimeError: g++ refused something; its output is in the message.
    """
    OUT.mkdir(parents=True, exist_ok=True)
    with _alone(), ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(lambda unit: _object(*unit), _units()))
        library = OUT / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
        newest = max(o.stat().st_mtime for o in objects)
        if not library.exists() or library.stat().st_mtime <= newest:
            libraries = [f"-L{path}" for path in library_paths()]
            libraries += ["-lc10", "-ltorch_cpu", "-ltorch_python"]
            inputs = map(str, objects)
            _run(["g++", "-shared", "-fopenmp", *inputs, *libraries, "-o", str(library)])
        return library


def build_cublas() -> Path:
    """The stand-in for cuBLAS, under the name that amp_mp looks for (torch_cuda.CUDA)."""
    OUT.mkdir(parents=True, exist_ok=True)
    source, library = HERE.parent / "fake_cublas.c", OUT / "libcublas.so"
    with _alone():
        if not library.exists() or library.stat().st_mtime <= source.stat().st_mtime:
            flags = ["-O2", "-shared", "-fPIC", "-ffp-contract=off"]
            name = f"-Wl,-soname,libcublas.so.{CUDA.split('.')[0]}"
            _run(["gcc", *flags, name, str(source), "-o", str(library), "-lm"])
    return library


def _units() -> list[tuple[Path, list[str]]]:
    """Every source with its flags, those that take longest first."""
    includes = [*include_paths(), sysconfig.get_paths()["include"]]
    for_torch = [part for path in includes for part in ("-isystem", path)]
    for_torch += [
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f'-DAMP_MP_TORCH_VERSION="{torch.__version__}"',
        '-DAMP_MP_CUDA_TOOLKIT="pretend"',
        '-DAMP_MP_CUDA_ARCHITECTURES=""',
        "-DAMP_MP_WITH_CUDA",
    ]
    kernels = [(s, ["-x", "c++"]) for s in sorted(CSRC.glob("cuda/*.cu"))]
    loops = [(s, ["-DAMP_MP_ISA=baseline"]) for s in sorted(CSRC.glob("cpu/*.cpp"))]
    with_torch = [*sorted(CSRC.glob("torch/**/*.cpp")), *sorted(HERE.glob("*.cpp"))]
    shim = [(s, ["-O2"]) for s in sorted(SHIM.glob("*.cpp"))]
    return [*kernels, *((s, for_torch) for s in with_torch), *loops, *shim]


def _object(source: Path, flags: list[str]) -> Path:
    """The object of a source: the library's own where that has what the pretend GPU needs."""
    if source.is_relative_to(CSRC / "torch"):
        parts = source.relative_to(CSRC).with_suffix("").parts
        librarys = ROOT / f"build/native/{'_'.join(parts)}.o"
        recipe, depends = librarys.with_suffix(".cmd"), librarys.with_suffix(".d")
        needed = ["-DAMP_MP_WITH_CUDA", f'-DAMP_MP_TORCH_VERSION="{torch.__version__}"']
        made = recipe.read_text() if recipe.exists() else ""
        if all(option in made for option in needed) and _is_current(librarys, depends):
            return librarys
    return _compile(source, flags)


def _compile(source: Path, flags: list[str]) -> Path:
    """Compile unless the object is newer than all that it was made from, in the same way."""
    target = OUT / f"{source.parent.name}-{source.name}.o"
    recipe, depends = target.with_suffix(".cmd"), target.with_suffix(".d")
    command = ["g++", *FLAGS, "-MMD", "-MF", str(depends), *flags, "-c", str(source)]
    if recipe.exists() and recipe.read_text() == str(command) and _is_current(target, depends):
        return target
    recipe.unlink(missing_ok=True)
    _run([*command, "-o", str(target)])
    recipe.write_text(str(command))
    return target


def _is_current(target: Path, depends: Path) -> bool:
    made_from = depends.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    made = target.stat().st_mtime
    return all(Path(p).exists() and Path(p).stat().st_mtime < made for p in made_from)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


@contextmanager
def _alone() -> Iterator[None]:
    """One process builds at a time; the others wait and find it done."""
    with open(OUT / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    print(build())
