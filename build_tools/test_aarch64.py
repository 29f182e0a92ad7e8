"""Tests a wheel for aarch64 on x86-64: cross-compiled, run under qemu, compared with this machine.

    python build_tools/test_aarch64.py --torch 2.13.0    # make test-aarch64

Needs Debian's packages NEEDED on a Debian or Ubuntu, and the Python of one of its releases. The
emulated system, torch and the wheel stay in build/ (.5 GB of downloads, 1.5 GB). First
tests/support/digest.py has to print here and there the same digests of what conversions, copies,
averages and steps of every rule in every format compute. Then README's example and TESTS run.

torch's packages for aarch64 use CUDA. Libraries without functions take the place of NVIDIA's but
for its runtime, which suffices as long as nothing asks for a GPU, and saves 2 GB of downloads.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from build_tools.packages import packages  # noqa: E402
from build_tools.test_wheel import ABOUT, copy_tree, run  # noqa: E402
from build_tools.wheel import for_machine  # noqa: E402

ARCH = "aarch64"
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
NEEDED = "qemu-user-static g++-aarch64-linux-gnu debian-archive-keyring"
RELEASES = {"3.11": "bookworm", "3.13": "trixie"}  # Debian's, by their Python
DEBIAN = f"python{VERSION} libpython{VERSION}-dev libgomp1 libstdc++6"
OF_TORCH = "filelock fsspec jinja2 networkx sympy typing_extensions nvidia-cuda-runtime==13.*"
HERE = ROOT / "build/aarch64"
SYSTEM = HERE / f"python{VERSION}"
PACKAGES = SYSTEM / f"usr/local/lib/python{VERSION}/dist-packages"
PYTHON = SYSTEM / "usr/bin/emulated-python"

# Without a configuration of its own apt-get would ask dpkg what this machine has.
APT = """
APT::Architecture "arm64"; APT::Architectures {{ "arm64"; }}; APT::Sandbox::User "root";
APT::Install-Recommends "false";
Dir::Etc::SourceList "{0}/sources.list"; Dir::Etc::SourceParts "{0}/none";
Dir::Etc::Parts "{0}/none"; Dir::Etc::PreferencesParts "{0}/none";
Dir::State "{0}"; Dir::State::status "{0}/status"; Dir::Cache "{0}";
"""
SOURCE = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
SOURCE += " http://deb.debian.org/debian {} main\n"

# qemu looks into the emulated system for a file first. With the host's, torch would take this
# processor for the emulated one and end by an illegal access.
CPUINFO = """processor\t: {}
BogoMIPS\t: 50.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
CORES = 2

# sys.executable is this script, so that programs which tests start are emulated, too.
START = """#!/bin/sh
exec {} -E OMP_NUM_THREADS=1 -0 "$0" {} "$@"
"""

# Those that say most in ten minutes. tests/casting/test_products.py does not end within five.
TESTS = (
    "tests/formats",
    "tests/optim/step/test_rules.py",
    "tests/optim/state/test_storage.py",
    "tests/optim/state/test_state_dicts.py",
    "tests/casting/test_casting.py",
    "tests/checkpoint/test_checkpoint.py",
)


def qemu() -> str:
    """The emulator; SystemExit where it, the compiler or Debian's keys are missing."""
    found = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    compiler, apt = shutil.which(f"{ARCH}-linux-gnu-g++"), shutil.which("apt-get")
    keys = Path("/usr/share/keyrings/debian-archive-keyring.gpg").exists()
    if not (found and compiler and apt and keys):
        raise SystemExit(f"On Debian or Ubuntu, something of this is missing: apt install {NEEDED}")
    if VERSION not in RELEASES:
        known = " or ".join(RELEASES)
        raise SystemExit(f"Debian has packages of Python {known}, and this is {VERSION}")
    return found


def download(folder: Path) -> None:
    """Debian's packages, unpacked into the folder, without a word to this machine's dpkg."""
    with tempfile.TemporaryDirectory() as name:
        apt = Path(name)
        for part in ("lists/partial", "archives/partial", "none"):
            (apt / part).mkdir(parents=True)
        (apt / "status").touch()
        (apt / "sources.list").write_text(SOURCE.format(RELEASES[VERSION]))
        (apt / "apt.conf").write_text(APT.format(apt))
        environment = {**os.environ, "APT_CONFIG": str(apt / "apt.conf")}
        run("apt-get", "-q", "update", env=environment)
        run("apt-get", "-qy", "install", "--download-only", *DEBIAN.split(), env=environment)
        for package in sorted(apt.glob("archives/*.deb")):
            subprocess.run(["dpkg-deb", "-x", package, folder], check=True)


def describe_processor(folder: Path) -> None:
    """What torch reads of it."""
    cpus = folder / "sys/devices/system/cpu"
    (folder / "proc").mkdir()
    (folder / "proc/cpuinfo").write_text("".join(CPUINFO.format(n) for n in range(CORES)))
    for n in range(CORES):
        (cpus / f"cpu{n}/regs/identification").mkdir(parents=True)
        (cpus / f"cpu{n}/regs/identification/midr_el1").write_text("0x00000000413fd0c1\n")
    for name in ("possible", "present", "online"):
        (cpus / name).write_text(f"0-{CORES - 1}\n")


def stand_ins(torch: Path) -> None:
    """Empty libraries for those of NVIDIA's that torch names; CUDA's runtime is a real one.

    torch's libraries register their kernels with the runtime when they are loaded.
    """
    libraries = SYSTEM / f"usr/lib/{ARCH}-linux-gnu"
    for runtime in PACKAGES.glob("nvidia/cu*/lib/libcudart.so.*"):
        shutil.copy(runtime, libraries)
    folders = [libraries, SYSTEM / f"lib/{ARCH}-linux-gnu", SYSTEM / "lib", torch / "lib"]
    command = ["readelf", "-d", *torch.glob("lib/*.so*")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = {line.split("[")[1].rstrip("]") for line in said.splitlines() if "(NEEDED)" in line}
    for name in sorted(needed):
        if not any((folder / name).exists() for folder in folders):
            empty = ["-shared", "-nostdlib", f"-Wl,-soname,{name}", "-x", "c", os.devnull]
            run(f"{ARCH}-linux-gnu-g++", *empty, "-o", libraries / name)


def pip(*arguments: str | Path) -> None:
    """Installs into the emulated system."""
    command = ("-m", "pip", "install", "--quiet", "--upgrade", "--target", PACKAGES)
    run(sys.executable, *command, *for_machine(ARCH), *arguments)


def write_start(script: Path, emulator: list[str], python: str) -> None:
    """Makes the script a Python under the emulator."""
    script.write_text(START.format(shlex.join(emulator), shlex.quote(python)))
    script.chmod(0o755)


def make_system(emulator: str) -> None:
    """The emulated system; made once."""
    if not (SYSTEM / "made").exists():
        shutil.rmtree(SYSTEM, ignore_errors=True)
        SYSTEM.mkdir(parents=True)
        download(SYSTEM)
        describe_processor(SYSTEM)
        pip(*packages("build", "test"), *OF_TORCH.split())
        (SYSTEM / "made").touch()
    # torch looks for NVIDIA's functions when they are called.
    options = ["-cpu", "neoverse-n1", "-L", str(SYSTEM), "-E", "TORCH_USE_RTLD_GLOBAL=1"]
    write_start(PYTHON, [emulator, *options], f"{SYSTEM}/usr/bin/python{VERSION}")


def install_wheel(torch: str) -> None:
    """Makes the wheel, without CUDA unless AMP_MP_CUDA says otherwise, and installs it."""
    # Debian's own headers for this machine's Python include those for the other.
    headers = HERE / "include"
    headers.mkdir(exist_ok=True)
    shutil.rmtree(headers / f"{ARCH}-linux-gnu", ignore_errors=True)
    (headers / f"{ARCH}-linux-gnu").mkdir()
    of_python = SYSTEM / f"usr/include/{ARCH}-linux-gnu/python{VERSION}"
    (headers / f"{ARCH}-linux-gnu/python{VERSION}").symlink_to(of_python)
    environment = {"AMP_MP_CUDA": "0", "CPLUS_INCLUDE_PATH": str(headers), **os.environ}
    options = ["--arch", ARCH, "--torch", torch, "--out", HERE]
    run(sys.executable, ROOT / "build_tools/wheel.py", *options, env=environment)
    tag = f"cp{VERSION.replace('.', '')}"
    pip("--no-deps", next(HERE.glob(f"amp_mp-*-{tag}-*{ARCH}.whl")))
    folder = ROOT / f"build/torch/{torch}-{ARCH}"
    (PACKAGES / "torch.pth").write_text(f"{folder}\n")
    stand_ins(folder / "torch")


def compare(tree: Path, emulated: Path) -> None:
    """Raises SystemExit where the emulated Python computes other bits than this one."""
    command = [tree / "tests/support/digest.py", "1"]
    digests = []
    for python in (sys.executable, emulated):
        print("+", python, *command, flush=True)
        done = subprocess.run([python, *command], cwd=tree, stdout=subprocess.PIPE, text=True)
        print(done.stdout, flush=True)
        if done.returncode:
            raise SystemExit(done.returncode)
        digests.append(done.stdout.splitlines()[1:])  # without the name of the instruction set
    if digests[0] != digests[1]:
        raise SystemExit(f"{emulated} computes other bits than {platform.machine()}")


def run_emulated(python: Path, tests: Sequence[str], jobs: str) -> None:
    """Compares an emulated Python with this one, and runs README's example and tests with it."""
    with tempfile.TemporaryDirectory(prefix=f"amp_mp-{python.name}-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        compare(tree, python)
        example = tree / "example.py"
        # A sixteenth of the rows; with all of them it takes ten minutes under emulation.
        example.write_text(example.read_text().replace("(4096, 32)", "(256, 32)"))
        run(python, "example.py", cwd=tree, env={})
        command = ["-m", "pytest", "-p", "no:cacheprovider", "-q", "-n", jobs]
        command += ["--dist", "loadgroup", "-m", "not full and not slow", "--timeout", "600"]
        command += ["--durations", "5"]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("AMP_MP_", "PYTHON"))}
        run(python, *command, *tests, cwd=tree, env=clean)


def main() -> None:
    """What the text above says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", required=True, help="a version, such as 2.13.0")
    parser.add_argument("--jobs", default="2", help="processes for the tests; default: %(default)s")
    parser.add_argument("tests", nargs="*", default=TESTS, help="default: what the text above says")
    arguments = parser.parse_args()
    make_system(qemu())
    install_wheel(arguments.torch)
    run(PYTHON, "-c", ABOUT)
    run_emulated(PYTHON, arguments.tests, arguments.jobs)


if __name__ == "__main__":
    main()
