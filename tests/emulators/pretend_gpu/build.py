"""Builds amp_mp._C a second time: kernels that run on the CPU, and the pretend GPU to run them on.

One library holds two modules: `_C` as in build_tools/native.py, but with kernels that g++ compiles,
and `amp_mp_pretend_gpu`, which is what tests see of the device.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from cuda_on_cpu.build import objects_of, shim_objects
from made import KEPT, ROOT, compiled, librarys, linked
from torch.utils.cpp_extension import include_paths, library_paths

HERE = Path(__file__).resolve().parent
SHIM = HERE.parent / "cuda_on_cpu"
sys.path.append(str(ROOT))

from build_tools.generated import facts_unit, one_unit, torch_unit  # noqa: E402

CSRC = ROOT / "csrc"
OUT = KEPT / "pretend_gpu"
CUDA = "99.0"  # what torch is to name: a torch for CUDA has loaded cuBLAS of its own version

# The arithmetic of build_tools/native.py. Little is optimised: compiling takes longer than running.
# NDEBUG, as there: functions of pybind11 that are not inlined are one for all objects.
FLAGS = [
    *("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-fopenmp", "-g0", "-Wall", "-Wextra"),
    *("-DNDEBUG", "-ffp-contract=off", "-fno-math-errno", f"-I{CSRC}", f"-I{SHIM}"),
]


def why_unavailable() -> str | None:
    """The reason why the library cannot be built here, or None if it can."""
    return None if shutil.which("g++") else "no g++"


def build() -> Path:
    """The library, made of what is there already where it is current.

    Raises:
        RuntimeError: g++ refused something; its output is in the message.
    """
    OUT.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(lambda unit: _object(*unit), _units()))
    plain = [
        path
        for glob in ("cuda/*.cu", "core/*.cpp", "cpu/*.cpp")
        for path in sorted(CSRC.glob(glob))
    ]
    objects += [*objects_of(plain, "plain", [CSRC]).values()]
    objects += shim_objects()
    libraries = [f"-L{path}" for path in library_paths()]
    libraries += ["-lc10", "-ltorch_cpu", "-ltorch_python"]
    command = ["g++", "-shared", "-fopenmp", *map(str, objects), *libraries]
    return linked(command, OUT / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}")


def build_cublas() -> Path:
    """The stand-in for cuBLAS, under the name that amp_mp looks for (torch_cuda.CUDA)."""
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-ffp-contract=off"]
    name = f"-Wl,-soname,libcublas.so.{CUDA.split('.')[0]}"
    source = HERE.parent / "fake_cublas.c"
    made = compiled(source, ["gcc", *flags])
    return linked(["gcc", "-shared", name, str(made), "-lm"], OUT / "libcublas.so")


def _units() -> list[tuple[Path, list[str]]]:
    """Every source with torch's headers, with its flags, those that take longest first."""
    includes = [*include_paths(), sysconfig.get_paths()["include"]]
    for_torch = [part for path in includes for part in ("-isystem", path)]
    own = one_unit(OUT / "pretend_gpu.cpp", sorted(HERE.glob("*.cpp")))
    with_torch = [own, torch_unit(CSRC, OUT), facts_unit(OUT, torch.__version__, "pretend", "")]
    return [(source, for_torch) for source in with_torch]


def _object(source: Path, flags: list[str]) -> Path:
    """The object of a source: the library's own where that has what the pretend GPU needs."""
    own = None
    if source.name.startswith("torch_"):
        minor = "_".join(torch.__version__.split(".")[:2])
        name = f"torch{minor}-{sys.implementation.cache_tag}/{source.stem}"
        own = librarys(name, include_paths()[0])
    return own or compiled(source, ["g++", *FLAGS, *flags])
