"""Builds amp_mp._C a second time: kernels that run on the CPU, and the pretend GPU to run them on.

One library holds two modules: `_C` as in build_tools/native.py but with `AMP_MP_WITH_CUDA`, and
`amp_mp_pretend_gpu`, which is what tests see of the device.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from cuda_on_cpu.build import objects_of, shim_objects
from made import KEPT, ROOT, compiled, linked
from torch.utils.cpp_extension import include_paths, library_paths

HERE = Path(__file__).resolve().parent
SHIM = HERE.parent / "cuda_on_cpu"
sys.path.append(str(ROOT))

from build_tools.unity import torch_units  # noqa: E402

CSRC = ROOT / "csrc"
OUT = KEPT / "pretend_gpu"
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
    """The library, made of what is there already where it is current.

    Raises:
        RuntimeError: g++ refused something; its output is in the message.
    """
    OUT.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(lambda unit: _object(*unit), _units()))
    objects += [*objects_of(sorted(CSRC.glob("cuda/*.cu")), "plain", [CSRC]).values()]
    objects += shim_objects()
    libraries = [f"-L{path}" for path in library_paths()]
    libraries += ["-lc10", "-ltorch_cpu", "-ltorch_python"]
    command = ["g++", "-shared", "-fopenmp", *map(str, objects), *libraries]
    return linked(command, OUT / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}")


def build_cublas() -> Path:
    """The stand-in for cuBLAS, under the name that amp_mp looks for (torch_cuda.CUDA)."""
    flags = ["-O2", "-fPIC", "-ffp-contract=off"]
    name = f"-Wl,-soname,libcublas.so.{CUDA.split('.')[0]}"
    source = HERE.parent / "fake_cublas.c"
    made = compiled(source, ["gcc", *flags])
    return linked(["gcc", "-shared", name, str(made), "-lm"], OUT / "libcublas.so")


def _units() -> list[tuple[Path, list[str]]]:
    """Every source but the kernels with its flags, those that take longest first."""
    includes = [*include_paths(), sysconfig.get_paths()["include"]]
    for_torch = [part for path in includes for part in ("-isystem", path)]
    for_torch += [
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f'-DAMP_MP_TORCH_VERSION="{torch.__version__}"',
        '-DAMP_MP_CUDA_TOOLKIT="pretend"',
        '-DAMP_MP_CUDA_ARCHITECTURES=""',
        "-DAMP_MP_WITH_CUDA",
    ]
    loops = [(s, ["-DAMP_MP_ISA=baseline"]) for s in sorted(CSRC.glob("cpu/*.cpp"))]
    with_torch = [*torch_units(CSRC, OUT), *sorted(HERE.glob("*.cpp"))]
    return [*((s, for_torch) for s in with_torch), *loops]


def _object(source: Path, flags: list[str]) -> Path:
    """The object of a source: the library's own where that has what the pretend GPU needs."""
    if source.parent == OUT:  # a unit of csrc/torch
        librarys = ROOT / f"build/native/{source.stem}.o"
        recipe, depends = librarys.with_suffix(".cmd"), librarys.with_suffix(".d")
        needed = ["-DAMP_MP_WITH_CUDA", f'-DAMP_MP_TORCH_VERSION="{torch.__version__}"']
        made = recipe.read_text() if recipe.exists() else ""
        if all(option in made for option in needed) and _is_current(librarys, depends):
            return librarys
    return compiled(source, ["g++", *FLAGS, *flags])


def _is_current(target: Path, depends: Path) -> bool:
    made_from = depends.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    made = target.stat().st_mtime
    return all(Path(p).exists() and Path(p).stat().st_mtime < made for p in made_from)
