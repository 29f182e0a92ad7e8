"""What building needs, looked for before anything is compiled: torch, a compiler, Python.h, CUDA.

Whatever is missing ends the build in one sentence, with the command that helps. torch is read, not
imported: its headers and its version.py are enough, and its libraries may be missing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = (2, 11), (2, 15)  # pyproject.toml's range: torch>=2.11,<2.16
RANGE = f"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
INSTALL = "pip install --no-build-isolation ."
# Kernels for sm_80 run on 8.6 and 8.9 too. PTX of 10.0, or of the newest before it that nvcc knows,
# serves what has no kernels of its own: 11.0 (Jetson Thor) and what comes later.
ARCHITECTURES = ("7.5", "8.0", "9.0", "10.0", "12.0")
PTX = "10.0"
OLDEST_NVCC = (12, 0)  # the first one with C++20
CPP20 = "#include <omp.h>\n#include <span>\nint main() { return int(std::span<int>().size()); }\n"


@dataclass(frozen=True)
class Torch:
    """A torch to compile for."""

    folder: Path  # of the package `torch`
    version: str  # such as 2.13.0+cu130
    cuda: str | None  # the CUDA version that it was built with; None for a CPU build

    @property
    def minor(self) -> tuple[int, int]:
        """The part of the version that a binding is compiled for: (2, 13)."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)

    @property
    def name(self) -> str:
        """The folder of its binding in amp_mp/native; amp_mp/__init__.py looks for it."""
        return "torch{}_{}".format(*self.minor)

    @property
    def includes(self) -> list[Path]:
        """The folders of its headers."""
        return [self.folder / "include", self.folder / "include/torch/csrc/api/include"]


@dataclass(frozen=True)
class Cuda:
    """The CUDA compiler, its version such as 13.0, and the flags that choose architectures."""

    nvcc: str
    release: str
    host: list[str]  # options that name the C++ compiler
    architectures: list[str]
    runtime: Path  # static: the library then loads on machines without CUDA

    @property
    def codes(self) -> str:
        """What the flags compile for: "compute_120 sm_90 ..."."""
        return " ".join(sorted({flag.split("code=")[1] for flag in self.architectures[1::2]}))


def find_torches() -> list[Torch]:
    """The packages named in AMP_MP_TORCH; without it the torch of this Python, or none."""
    if named := os.environ.get("AMP_MP_TORCH"):
        folders = [Path(folder).absolute() for folder in named.split(os.pathsep)]
    else:
        spec = importlib.util.find_spec("torch")
        folders = [Path(spec.origin).parent] if spec and spec.origin else []
    torches = []
    for folder in folders:
        if not (folder / "version.py").exists():
            raise SystemExit(f"AMP_MP_TORCH: {folder} is not the folder of a package torch")
        about = runpy.run_path(str(folder / "version.py"))
        torches.append(Torch(folder, about["__version__"], about.get("cuda")))
    return torches


def check_torches(torches: list[Torch]) -> None:
    """Raises SystemExit where there is none, or one that amp_mp does not work with."""
    if not torches and any(re.search(r"build-env|builds-v\d", path) for path in sys.path):
        raise SystemExit(
            "amp_mp is compiled against the torch that it will run with, and pip builds in an "
            f"environment without it. Install torch, then build in your own environment:\n"
            f"    pip install 'setuptools>=64' wheel\n    {INSTALL}"
        )
    if not torches:
        raise SystemExit(
            "amp_mp is compiled against the torch that it will run with, and "
            f"{sys.executable} has none:\n    pip install '{RANGE}'\n    {INSTALL}"
        )
    for torch in torches:
        if not OLDEST <= torch.minor <= NEWEST:
            raise SystemExit(
                f"amp_mp needs {RANGE}, found torch {torch.version}; nothing was installed:\n"
                f"    pip install '{RANGE}'\n    {INSTALL}"
            )
        if not (torch.folder / "include").is_dir():
            raise SystemExit(
                f"torch {torch.version} in {torch.folder} has no C++ headers; pip's have:\n"
                f"    pip install --force-reinstall torch=={torch.version.split('+')[0]}"
            )


def machine() -> str:
    """The processor that is built for: this one, or that of _PYTHON_HOST_PLATFORM (wheel.py)."""
    return sysconfig.get_platform().rpartition("-")[2]


def is_foreign() -> bool:
    """Whether what is built runs on another processor than this one."""
    return machine() != platform.machine()


def compiler() -> list[str]:
    """The C++ compiler and its first arguments."""
    return shlex.split(os.environ.get("CXX") or "g++")


def runs(level: str) -> bool:
    """Whether this processor runs a level of x86-64, "x86-64-v3"; False where no program runs.

    The compiler's own answer, by which csrc/cpu/select.cpp chooses when the library is loaded.
    """
    code = f'int main() {{ return !__builtin_cpu_supports("{level}"); }}\n'
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/runs"
        command = [*compiler(), "-x", "c++", "-", "-o", program]
        done = subprocess.run(command, input=code, capture_output=True, text=True)
        try:
            return done.returncode == 0 and subprocess.run([program]).returncode == 0
        except OSError:  # a folder for temporary files from which nothing may be started
            return False


def check_python() -> None:
    """Raises SystemExit in a Python that amp_mp does not work with, or without Python.h."""
    if "t" in sys.abiflags:
        raise SystemExit(
            f"amp_mp is not tested in free-threaded Python, and {sys.executable} is one. Use an "
            f"ordinary build of Python {sys.version_info[0]}.{sys.version_info[1]}."
        )
    package = f"python{sys.version_info[0]}.{sys.version_info[1]}-dev"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        raise SystemExit(
            f"Python's headers are missing ({header}):\n"
            f"    apt install python3-dev    # or {package}; on Fedora: dnf install python3-devel"
        )
    # Debian's pyconfig.h includes another processor's, which has a package of its own.
    command = [*compiler(), "-fsyntax-only", f"-I{header.parent}", "-x", "c++", str(header)]
    done = subprocess.run(command, capture_output=True, text=True) if is_foreign() else None
    if done and done.returncode:
        raise SystemExit(
            f"Python's headers in {header.parent} are not for {machine()}:\n{done.stderr}"
            "pyenv's serve every processor. Debian has a package for each:\n"
            f"    dpkg --add-architecture arm64; apt install lib{package}:arm64"
        )


def check_compiler() -> None:
    """Raises SystemExit without a compiler of C++20 and OpenMP."""
    command = [*compiler(), "-std=c++20", "-fopenmp", "-x", "c++", "-", "-o", os.devnull]
    try:
        done = subprocess.run(command, input=CPP20, capture_output=True, text=True)
    except OSError as error:
        raise SystemExit(
            f"No C++ compiler: {command[0]} cannot be started ({error.strerror}). Install one, or "
            "name one in CXX:\n    apt install g++    # on Fedora: dnf install gcc-c++"
        ) from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise SystemExit(
            f"{shlex.join(compiler())} cannot compile C++20 with OpenMP ({said[-1]}). Name GCC 11 "
            f"or later in CXX:\n    CXX=g++-12 {INSTALL}"
        )


def find_cuda(torches: list[Torch]) -> Cuda | None:
    """The CUDA toolkit, or None if it is not wanted, or not found where nothing asks for it."""
    if missing := missing_nvcc(torches):
        raise SystemExit(
            f"{missing[0]}, but no nvcc is in CUDA_HOME or on the PATH. Install it, or build "
            f"without CUDA kernels:\n{pip_install(missing[1])}    AMP_MP_CUDA=0 {INSTALL}"
        )
    wanted = _wanted()
    nvcc = find_nvcc(torches)
    if wanted == "0" or nvcc is None:
        return None
    of_torch = _with_cuda(torches)
    # nvcc may be a wrapper that lies outside the toolkit, but it knows where that is.
    dry = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True).stderr
    version = run([nvcc, "--version"])
    top, release = re.search(r"TOP=(\S+)", dry), re.search(r"release (\d+)\.(\d+),", version)
    if not top or not release:
        raise SystemExit(f"{nvcc} does not answer like a CUDA compiler:\n{dry}\n{version}")
    major, minor = int(release[1]), int(release[2])
    if (major, minor) < OLDEST_NVCC:
        raise SystemExit(
            f"{nvcc} is CUDA {major}.{minor}, which has no C++20. Name a toolkit from 12.0 on:\n"
            f"    CUDA_HOME=/usr/local/cuda-12.8 {INSTALL}"
        )
    if wanted == "" and of_torch and major > int(str(of_torch.cuda).split(".")[0]):
        raise SystemExit(
            f"{nvcc} is CUDA {major}.{minor}, but torch {of_torch.version} uses CUDA "
            f"{of_torch.cuda}: a driver that is new enough for torch may refuse the kernels. Name "
            f"a toolkit of torch's version, or say that the driver is new enough:\n"
            f"    CUDA_HOME=/usr/local/cuda-{of_torch.cuda} {INSTALL}\n    AMP_MP_CUDA=1 {INSTALL}"
        )
    host = host_compiler(Path(top[1]))
    check_host_compiler(nvcc, host)
    runtime = static_runtime(Path(top[1]), torches)
    return Cuda(nvcc, f"{major}.{minor}", host, architecture_flags(nvcc), runtime)


def static_runtime(toolkit: Path, torches: list[Torch]) -> Path:
    """CUDA's static library: the toolkit's, or, for another processor, that of pip's packages."""
    name = "libcudart_static.a"
    folders = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
    places, under = [toolkit / folder for folder in folders], str(toolkit)
    if is_foreign():  # the toolkit's first folders have this processor's
        places = [p for torch in torches for p in torch.folder.parent.glob("nvidia/cu*/lib")]
        under = f"{torches[0].folder.parent} for {machine()}"
    found = [path for place in places if (path := place / name).exists()]
    if not found:
        raise SystemExit(f"{name} not found under {under}; install the CUDA runtime's library")
    return found[0]


def find_nvcc(torches: list[Torch]) -> str | None:
    """In CUDA_HOME if that is set; else on the PATH, in /usr/local/cuda, in pip's packages."""
    if home := os.environ.get("CUDA_HOME"):
        return shutil.which("nvcc", path=f"{home}/bin")
    pips = [str(nvcc) for t in torches for nvcc in t.folder.parent.glob("nvidia/cu*/bin")]
    paths = [None, "/usr/local/cuda/bin", *sorted(pips)]
    return next(filter(None, (shutil.which("nvcc", path=path) for path in paths)), None)


def host_compiler(toolkit: Path) -> list[str]:
    """nvcc's options that name the C++ compiler; nvcc itself takes g++."""
    cxx = compiler()
    named = ["-ccbin", *cxx] if os.environ.get("CXX") and len(cxx) == 1 else []
    # For another processor nvcc looks for headers of its own, but CUDA's are the same for all.
    return named + (["-isystem", str(toolkit / "include")] if is_foreign() else [])


def check_host_compiler(nvcc: str, host: list[str]) -> None:
    """Raises SystemExit where the C++ compiler is newer than nvcc knows."""
    command = [nvcc, *host, "-x", "cu", "-c", os.devnull, "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        said = next((line for line in lines if "error" in line), lines[-1])
        raise SystemExit(
            f"{nvcc} does not work with {shlex.join(compiler())}: {said}\n"
            f"Name an older compiler in CXX:\n    apt install g++-14\n    CXX=g++-14 {INSTALL}"
        )


def missing_nvcc(torches: list[Torch]) -> tuple[str, list[str]] | None:
    """What asks for CUDA kernels where no nvcc is, and pip's packages of nvcc; else None.

    AMP_MP_CUDA=1 asks, and a torch that uses CUDA on a machine with a GPU.
    """
    wanted, of_torch = _wanted(), _with_cuda(torches)
    asked = wanted == "1" or (wanted == "" and of_torch is not None and has_gpu())
    if not asked or find_nvcc(torches):
        return None
    if of_torch is None:
        return "AMP_MP_CUDA=1", []
    packages = []
    if int(str(of_torch.cuda).split(".")[0]) >= 13:  # before, pip's packages have no nvvm
        # Of one version: a newer nvvm and an older ptxas do not fit.
        names = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt")
        packages = [f"{name}=={of_torch.cuda}.*" for name in names]
    return f"torch {of_torch.version} uses CUDA {of_torch.cuda}", packages


def has_gpu() -> bool:
    """Whether the machine has NVIDIA's driver: its program or its library."""
    if shutil.which("nvidia-smi"):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def pip_install(packages: list[str]) -> str:
    """A line of a message with the command that installs packages; "" for none."""
    return f"    pip install {shlex.join(packages)}\n" if packages else ""


def _wanted() -> str:
    """AMP_MP_CUDA: "1" demands kernels, "0" leaves them out, "" leaves it to what is found."""
    wanted = os.environ.get("AMP_MP_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"AMP_MP_CUDA must be 0 or 1, found {wanted!r}")
    return wanted


def _with_cuda(torches: list[Torch]) -> Torch | None:
    return next((torch for torch in torches if torch.cuda), None)


def architecture_flags(nvcc: str) -> list[str]:
    """nvcc's -gencode flags: for TORCH_CUDA_ARCH_LIST, or for all that this nvcc can compile."""
    known = {int(n) for n in re.findall(r"compute_(\d+)", run([nvcc, "--list-gpu-arch"]))}
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if not listed:
        chosen = [a for a in ARCHITECTURES if int(a.replace(".", "")) in known]
        ptx = max((a for a in chosen if float(a) <= float(PTX)), key=float)
        listed = ";".join(a + "+PTX" * (a == ptx) for a in chosen)
    flags = []
    for arch in re.split(r"[;\s]+", listed.strip("; ")):
        number = arch.removesuffix("+PTX").replace(".", "")
        if not re.fullmatch(r"\d{2,3}[af]?", number):
            raise SystemExit(
                f"TORCH_CUDA_ARCH_LIST: cannot read {arch!r}, expected like 9.0 or 9.0+PTX"
            )
        if int(number.rstrip("af")) not in known:
            knows = ", ".join(f"{n // 10}.{n % 10}" for n in sorted(known))
            raise SystemExit(
                f"TORCH_CUDA_ARCH_LIST asks for {arch}, which {nvcc} does not know; "
                f"it knows {knows}"
            )
        codes = [f"sm_{number}"] + ([f"compute_{number}"] if arch.endswith("+PTX") else [])
        for code in codes:
            flags += ["-gencode", f"arch=compute_{number},code={code}"]
    return flags


def run(command: list[str]) -> str:
    """Run a command and return its output; on failure exit with what it said."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout
