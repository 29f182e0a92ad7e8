"""Builds amp_mp._C: CPU loops for several instruction sets and, where nvcc is found, CUDA kernels.

Neither setuptools nor torch.utils.cpp_extension can do this: they compile every source with the
same flags, and the latter wants a torch with CUDA and links CUDA's runtime dynamically.

Environment: AMP_MP_CUDA=1 demands CUDA, 0 leaves it out; TORCH_CUDA_ARCH_LIST chooses architectures
(default 7.5;8.0;9.0;10.0+PTX); AMP_MP_PLAIN_QUOTIENT=1 divides by CUDA's plain operations
(csrc/cuda/quotient.h); AMP_MP_WERROR=1 makes warnings errors; CUDA_HOME, CXX and MAX_JOBS as
usual. Whether this machine has a GPU does not matter: machines that build often have none.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext

from build_tools.unity import torch_units

try:
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths
except ImportError as error:
    raise SystemExit(
        "amp_mp is compiled against the torch it will run with: install torch first, then\n"
        "    pip install --no-build-isolation .\n"
        f"(import torch failed: {error})"
    ) from error

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
IS_X86 = platform.machine() in ("x86_64", "AMD64")
INSTRUCTION_SETS = {"avx512": "x86-64-v4", "avx2": "x86-64-v3", "baseline": "x86-64"}

# -ffp-contract=off and -fmad=false: CPU, CUDA and a NumPy reference agree bit for bit.
# -fno-math-errno: without it sqrt keeps loops scalar. Never -ffast-math or --use_fast_math: they
# let the compiler assume that no number is infinite, and so delete the overflow check.
CXX_FLAGS = "-std=c++20 -O3 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -fopenmp"
# -compress-all: kernels in a third of the bytes; the driver unpacks those that are used.
NVCC_FLAGS = "-std=c++20 -O3 -fmad=false -Xfatbin -compress-all"
NVCC_FLAGS += " -Xcompiler -fPIC,-fvisibility=hidden"
# Errors where the project is developed; a user's newer compiler may have new warnings.
STRICT = os.environ.get("AMP_MP_WERROR") == "1"
WARNINGS = "-Wall -Wextra" + (" -Werror" if STRICT else "")
NVCC_WARNINGS = "-Werror all-warnings" if STRICT else ""


@dataclass(frozen=True)
class Unit:
    """One compilation. A source may have several, with different flags."""

    source: Path
    command: list[str]  # the compiler and its flags
    variant: str = ""

    @property
    def name(self) -> str:
        """The object's name: cpu_loops_avx2 for cpu/loops.cpp."""
        if not self.source.is_relative_to(CSRC):
            return self.source.stem
        parts = self.source.relative_to(CSRC).with_suffix("").parts
        return "_".join([*parts, self.variant] if self.variant else parts)


@dataclass(frozen=True)
class Cuda:
    """The CUDA compiler, its version such as 13.0, and the flags that choose architectures."""

    nvcc: str
    release: str
    architectures: list[str]
    runtime: Path  # static: the library then loads on machines without CUDA


def find_cuda() -> Cuda | None:
    """The CUDA toolkit, or None if it is not wanted or not found."""
    wanted = os.environ.get("AMP_MP_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"AMP_MP_CUDA must be 0 or 1, found {wanted!r}")
    home = os.environ.get("CUDA_HOME")
    path = [str(Path(home, "bin"))] if home else [None, "/usr/local/cuda/bin"]
    nvcc = next(filter(None, (shutil.which("nvcc", path=p) for p in path)), None)
    if nvcc is None and wanted == "1":
        raise SystemExit("AMP_MP_CUDA=1, but no nvcc in CUDA_HOME or on the PATH")
    if nvcc is None or wanted == "0":
        return None
    # nvcc may be a wrapper that lies outside the toolkit, but it knows where that is.
    dry = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True).stderr
    version = run([nvcc, "--version"])
    top, release = re.search(r"TOP=(\S+)", dry), re.search(r"release (\S+),", version)
    if not top or not release:
        raise SystemExit(f"{nvcc} does not answer like a CUDA compiler:\n{dry}\n{version}")
    name = "libcudart_static.a"
    folders = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
    found = [p for folder in folders if (p := Path(top[1], folder, name)).exists()]
    if not found:
        raise SystemExit(f"{name} not found under {top[1]}; install the CUDA runtime's library")
    return Cuda(nvcc, release[1], architecture_flags(), found[0])


def architecture_flags() -> list[str]:
    """nvcc's -gencode flags for TORCH_CUDA_ARCH_LIST."""
    flags = []
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST") or "7.5;8.0;9.0;10.0+PTX"
    for arch in re.split(r"[;\s]+", listed.strip("; ")):
        number = arch.removesuffix("+PTX").replace(".", "")
        if not re.fullmatch(r"\d{2,3}[af]?", number):
            raise SystemExit(
                f"TORCH_CUDA_ARCH_LIST: cannot read {arch!r}, expected like 9.0 or 9.0+PTX"
            )
        codes = [f"sm_{number}"] + ([f"compute_{number}"] if arch.endswith("+PTX") else [])
        for code in codes:
            flags += ["-gencode", f"arch=compute_{number},code={code}"]
    return flags


def units(cuda: Cuda | None, folder: Path) -> list[Unit]:
    """Everything that is compiled; `folder` is for generated sources."""
    base = [*compiler(), *CXX_FLAGS.split(), *WARNINGS.split(), f"-I{CSRC}"]
    listed = [Unit(CSRC / "cpu/passes.cpp", base)]
    listed += [Unit(CSRC / "cpu/select.cpp", [*base, *(["-DAMP_MP_X86"] if IS_X86 else [])])]
    for isa in INSTRUCTION_SETS if IS_X86 else ("baseline",):
        flags = [f"-DAMP_MP_ISA={isa}"]
        if IS_X86:  # GCC 12 warns of an undefined value in its own AVX-512 header
            flags += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]
            flags += [f"-march={INSTRUCTION_SETS[isa]}"]
        listed.append(Unit(CSRC / "cpu/loops.cpp", [*base, *flags], isa))
    if cuda:
        flags = [*NVCC_FLAGS.split(), *NVCC_WARNINGS.split(), *cuda.architectures, f"-I{CSRC}"]
        if os.environ.get("AMP_MP_PLAIN_QUOTIENT") == "1":
            flags.append("-DAMP_MP_PLAIN_QUOTIENT")
        listed += [Unit(s, [cuda.nvcc, *flags]) for s in sorted(CSRC.glob("cuda/*.cu"))]
    codes = sorted({a.split("code=")[1] for a in cuda.architectures[1::2]}) if cuda else []
    for_torch = [
        *base,
        f'-DAMP_MP_TORCH_VERSION="{torch.__version__}"',
        f'-DAMP_MP_CUDA_TOOLKIT="{cuda.release if cuda else ""}"',
        f'-DAMP_MP_CUDA_ARCHITECTURES="{" ".join(codes)}"',
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(["-DAMP_MP_WITH_CUDA"] if cuda else []),
    ]
    for path in [*include_paths(), sysconfig.get_paths()["include"]]:
        for_torch += ["-isystem", path]
    found = [Unit(s, for_torch) for s in torch_units(CSRC, folder)] + listed
    # The one that takes two minutes begins first, so that no core waits for it at the end.
    return sorted(found, key=lambda unit: unit.source.name != "apply.cu")


def compile_unit(unit: Unit, folder: Path) -> Path:
    """Compile, unless the object is newer than its sources and was made by the same command."""
    target, depends, recipe = (folder / f"{unit.name}.{end}" for end in ("o", "d", "cmd"))
    dependencies = ["-MMD", "-MF", str(depends)]
    command = [*unit.command, *dependencies, "-c", str(unit.source), "-o", str(target)]
    if recipe.exists() and recipe.read_text() == str(command) and is_current(target, depends):
        return target
    print(f"compiling {unit.name}", flush=True)
    recipe.unlink(missing_ok=True)
    run(command)
    recipe.write_text(str(command))
    return target


def is_current(target: Path, depends: Path) -> bool:
    """Whether an object is newer than all files that the compiler has listed in `depends`."""
    if not target.exists() or not depends.exists():
        return False
    used = depends.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    made = target.stat().st_mtime
    return all(os.path.exists(path) and os.path.getmtime(path) < made for path in used)


def compiler() -> list[str]:
    """The C++ compiler and its first arguments."""
    return shlex.split(os.environ.get("CXX", "g++"))


def run(command: list[str]) -> str:
    """Run a command and return its output; on failure exit with what it said."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def count_kernels(objects: list[Path]) -> int:
    """How many CUDA kernels there are; printed, since templates can multiply them unnoticed."""
    symbols = [run(["nm", "-C", str(o)]) for o in objects if o.name.startswith("cuda_")]
    return len(set(re.findall(r"__device_stub__(\w+)\(", "".join(symbols))))


class BuildNative(build_ext):
    """setuptools' build_ext with the compilation above."""

    def build_extension(self, ext: Extension) -> None:
        """Compile and link amp_mp._C, and note the torch version that it was built for."""
        cuda = find_cuda()
        # pip makes a new folder for every build; AMP_MP_OBJECTS names one that lasts.
        temp = ROOT / (os.environ.get("AMP_MP_OBJECTS") or self.build_temp)
        temp.mkdir(parents=True, exist_ok=True)
        jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        with ThreadPoolExecutor(jobs) as pool:
            objects = list(pool.map(lambda unit: compile_unit(unit, temp), units(cuda, temp)))

        target = Path(self.get_ext_fullpath(ext.name)).absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        link = [*compiler(), "-shared", "-fopenmp", "-Wl,--strip-all", *map(str, objects)]
        link += [f"-L{path}" for path in library_paths()]
        link += [str(cuda.runtime), "-lrt", "-lpthread"] if cuda else []
        run([*link, "-lc10", "-ltorch_cpu", "-ltorch_python", "-ldl", "-o", str(target)])
        (target.parent / "_built_for.py").write_text(f'TORCH_VERSION = "{torch.__version__}"\n')
        size, kernels = target.stat().st_size / 2**20, count_kernels(objects)
        print(f"{target.name}: {size:.2f} MiB, {kernels} CUDA kernels", flush=True)

    def copy_extensions_to_source(self) -> None:
        """For in-place and editable builds: the note of the torch version goes with the library."""
        super().copy_extensions_to_source()
        package = self.get_finalized_command("build_py").get_package_dir("amp_mp")
        shutil.copy(Path(self.build_lib, "amp_mp/_built_for.py"), package)
