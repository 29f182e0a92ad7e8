"""Builds amp_mp._C: one extension with CPU loops for several instruction sets and, where nvcc is
found, CUDA kernels. Metadata is in pyproject.toml.

Environment: AMP_MP_CUDA=1 demands CUDA, 0 leaves it out; TORCH_CUDA_ARCH_LIST chooses architectures
(default 7.5;8.0;9.0;10.0+PTX); AMP_MP_WERROR=1 makes warnings errors; CUDA_HOME, CXX and MAX_JOBS
as usual. Whether this machine has a GPU is never asked: machines that build often have none.
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

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths
except ImportError as error:
    raise SystemExit(
        "amp_mp is compiled against the torch it will run with: install torch first, then\n"
        "    pip install --no-build-isolation .\n"
        f"(import torch failed: {error})"
    ) from error

ROOT = Path(__file__).parent
CSRC = ROOT / "csrc"
INSTRUCTION_SETS = {"avx512": "x86-64-v4", "avx2": "x86-64-v3", "baseline": "x86-64"}

# -ffp-contract=off and -fmad=false: CPU, CUDA and a NumPy reference agree bit for bit.
# -fno-math-errno: without it sqrt keeps loops scalar. Never -ffast-math or --use_fast_math: they
# let the compiler assume that no number is infinite, and so delete the overflow check.
CXX_FLAGS = "-std=c++20 -O3 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -fopenmp"
NVCC_FLAGS = "-std=c++20 -O3 -fmad=false -Xcompiler -fPIC,-fvisibility=hidden"
# Errors where the project is developed; somebody else's newer compiler may warn of more.
STRICT = os.environ.get("AMP_MP_WERROR") == "1"
WARNINGS = "-Wall -Wextra" + (" -Werror" if STRICT else "")
NVCC_WARNINGS = "-Werror all-warnings" if STRICT else ""


@dataclass(frozen=True)
class Unit:
    """One compilation: a source may be compiled more than once, with other flags."""

    source: Path
    name: str
    command: tuple[str, ...]


def find_nvcc() -> str | None:
    """The CUDA compiler, or None where CUDA is left out."""
    wanted = os.environ.get("AMP_MP_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"AMP_MP_CUDA must be 0 or 1, found {wanted!r}")
    if wanted == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    if home:
        nvcc = shutil.which("nvcc", path=str(Path(home, "bin")))
    else:
        nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None and wanted == "1":
        raise SystemExit("AMP_MP_CUDA=1, but no nvcc in CUDA_HOME or on the PATH")
    return nvcc


def toolkit(nvcc: str) -> tuple[Path, str]:
    """The toolkit's folder (nvcc may be a wrapper elsewhere) and its version."""
    dry = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True)
    top = re.search(r"TOP=(\S+)", dry.stderr)
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\S+),", version)
    if not top or not release:
        raise SystemExit(f"{nvcc} does not answer like a CUDA compiler:\n{dry.stderr}\n{version}")
    return Path(top[1]), release[1]


def architecture_flags() -> list[str]:
    flags = []
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST") or "7.5;8.0;9.0;10.0+PTX"
    for arch in re.split(r"[;\s]+", listed.strip("; ")):
        number = arch.removesuffix("+PTX").replace(".", "")
        if not re.fullmatch(r"\d{2,3}[af]?", number):
            raise SystemExit(
                f"TORCH_CUDA_ARCH_LIST: cannot read {arch!r}, expected like 9.0 or 9.0+PTX"
            )
        flags += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
        if arch.endswith("+PTX"):
            flags += ["-gencode", f"arch=compute_{number},code=compute_{number}"]
    return flags


def find_library(folder: Path, name: str) -> Path:
    for candidate in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        if (folder / candidate / name).exists():
            return folder / candidate / name
    raise SystemExit(f"{name} not found under {folder}; install the CUDA runtime's static library")


class BuildNative(build_ext):
    """setuptools compiles every source of an extension with the same flags; we need three sets."""

    def build_extension(self, ext: Extension) -> None:
        nvcc = find_nvcc()
        cuda_root, release = toolkit(nvcc) if nvcc else (None, "")
        architectures = architecture_flags() if nvcc else []
        codes = sorted({re.sub(r".*code=", "", a) for a in architectures if a != "-gencode"})
        defines = [
            f'-DAMP_MP_TORCH_VERSION="{torch.__version__}"',
            f'-DAMP_MP_CUDA_TOOLKIT="{release}"',
            f'-DAMP_MP_CUDA_ARCHITECTURES="{" ".join(codes)}"',
        ]
        units = self.cpu_units() + self.torch_units(defines, with_cuda=nvcc is not None)
        if nvcc:
            flags = [nvcc, *NVCC_FLAGS.split(), *NVCC_WARNINGS.split(), *architectures, f"-I{CSRC}"]
            units += [
                Unit(s, f"cuda_{s.stem}", tuple(flags)) for s in sorted(CSRC.glob("cuda/*.cu"))
            ]
        # pip makes a new folder for every build; AMP_MP_OBJECTS names one that lasts.
        temp = ROOT / (os.environ.get("AMP_MP_OBJECTS") or self.build_temp)
        temp.mkdir(parents=True, exist_ok=True)
        jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        with ThreadPoolExecutor(jobs) as pool:
            objects = list(pool.map(lambda unit: compile_unit(unit, temp), units))

        target = Path(self.get_ext_fullpath(ext.name)).absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        link = [*compiler(), "-shared", "-fopenmp", "-Wl,--strip-all", *map(str, objects)]
        link += [f"-L{path}" for path in library_paths()]
        if cuda_root:  # static: the library loads where there is no CUDA at all
            link += [str(find_library(cuda_root, "libcudart_static.a")), "-lrt", "-lpthread"]
        link += ["-lc10", "-ltorch_cpu", "-ltorch_python", "-ldl"]
        run([*link, "-o", str(target)])
        (target.parent / "_built_for.py").write_text(f'TORCH_VERSION = "{torch.__version__}"\n')
        report(target, objects)

    def copy_extensions_to_source(self) -> None:
        """For in-place and editable builds: the note of the torch version goes with the library."""
        super().copy_extensions_to_source()
        package = self.get_finalized_command("build_py").get_package_dir("amp_mp")
        shutil.copy(Path(self.build_lib, "amp_mp/_built_for.py"), package)

    def cpu_units(self) -> list[Unit]:
        base = [*compiler(), *CXX_FLAGS.split(), *WARNINGS.split(), f"-I{CSRC}"]
        x86 = platform.machine() in ("x86_64", "AMD64")
        units = []
        for name, march in INSTRUCTION_SETS.items():
            if x86 or name == "baseline":
                # GCC 12 takes the undefined value inside its own AVX-512 header for a mistake of
                # ours.
                flags = [f"-march={march}"] if x86 else []
                flags += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"] if x86 else []
                command = (*base, *flags, f"-DAMP_MP_ISA={name}")
                units.append(Unit(CSRC / "cpu/loops.cpp", f"cpu_loops_{name}", command))
        defines = ["-DAMP_MP_X86"] if x86 else []
        for source in ("select", "passes"):
            units.append(Unit(CSRC / f"cpu/{source}.cpp", f"cpu_{source}", (*base, *defines)))
        return units

    def torch_units(self, defines: list[str], with_cuda: bool) -> list[Unit]:
        includes = [*include_paths(), sysconfig.get_paths()["include"]]
        command = [*compiler(), *CXX_FLAGS.split(), *WARNINGS.split(), f"-I{CSRC}", *defines]
        command += [part for path in includes for part in ("-isystem", path)]
        command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        command += ["-DAMP_MP_WITH_CUDA"] if with_cuda else []
        sources = sorted(CSRC.glob("torch/**/*.cpp"))
        return [Unit(s, f"torch_{s.stem}", tuple(command)) for s in sources]


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "g++"))


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")


def compile_unit(unit: Unit, folder: Path) -> Path:
    """Compiles unless the object is newer than all it was made from and was made the same way."""
    target, depends = folder / f"{unit.name}.o", folder / f"{unit.name}.d"
    recipe = folder / f"{unit.name}.cmd"
    command = [
        *unit.command,
        "-MMD",
        "-MF",
        str(depends),
        "-c",
        str(unit.source),
        "-o",
        str(target),
    ]
    if (
        target.exists()
        and depends.exists()
        and recipe.exists()
        and recipe.read_text() == str(command)
    ):
        used = depends.read_text().replace("\\\n", " ").split(":", 1)[1].split()
        if all(os.path.exists(u) and os.path.getmtime(u) < target.stat().st_mtime for u in used):
            return target
    print(f"compiling {unit.name}", flush=True)
    run(command)
    recipe.write_text(str(command))
    return target


def report(library: Path, objects: list[Path]) -> None:
    """Kernels multiply silently; the number and the size are printed so that somebody notices."""
    kernels = set()
    for path in objects:
        if path.name.startswith("cuda_"):
            symbols = subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True).stdout
            kernels |= set(re.findall(r"__device_stub__(\w+)\(", symbols))
    print(
        f"{library.name}: {library.stat().st_size / 2**20:.2f} MiB, {len(kernels)} CUDA kernels",
        flush=True,
    )


setup(ext_modules=[Extension("amp_mp._C", [])], cmdclass={"build_ext": BuildNative})
