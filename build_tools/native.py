"""Builds the two libraries: the kernels, without torch, and the binding to each torch there is.

amp_mp/native/libamp_mp_kernels.so has the CPU loops for several instruction sets and, where nvcc is
found, the CUDA kernels. amp_mp/native/torch2_13/_C...so is csrc/torch, compiled for torch 2.13.
pip and `make wheel` compile all of it; `make` what this machine runs.

Neither setuptools nor torch.utils.cpp_extension can do this: they compile every source with the
same flags, and the latter wants a torch with CUDA and links CUDA's runtime dynamically.

Environment: AMP_MP_CUDA=1 demands CUDA, 0 leaves it out, and without it kernels are compiled where
nvcc is found, also on a machine without a GPU; AMP_MP_LOOPS=here compiles the CPU loops for the
instruction sets that this processor runs, "baseline,avx2" for these, "all" (as without it) for
every one; TORCH_CUDA_ARCH_LIST chooses architectures (found.ARCHITECTURES); AMP_MP_TORCH names
folders of packages `torch` to compile for, separated by colons; AMP_MP_OBJECTS the folder that
keeps objects; AMP_MP_PLAIN_QUOTIENT=1 divides by CUDA's plain operations (csrc/cuda/quotient.h);
AMP_MP_WERROR=1 makes warnings errors; CUDA_HOME, CXX and MAX_JOBS as usual.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext

from build_tools.found import (
    ROOT,
    Cuda,
    Torch,
    check_compiler,
    check_python,
    check_torches,
    compiler,
    find_cuda,
    find_torches,
    is_foreign,
    machine,
    run,
    runs,
)
from build_tools.generated import facts_unit, families_of, torch_unit

CSRC = ROOT / "csrc"
KERNELS = "amp_mp.native.libamp_mp_kernels"
# What takes longest begins first, so that no core waits for it at the end. Beginnings of names.
LONGEST = ("cuda_apply_adam", "torch_", "cuda_apply", "cpu_apply", "cuda_decide", "cpu_loops")
IS_X86 = machine() in ("x86_64", "AMD64")
INSTRUCTION_SETS = {"avx512": "x86-64-v4", "avx2": "x86-64-v3", "baseline": "x86-64"}

# Note: The same bits everywhere (docs/design.md)
# -ffp-contract=off and -fmad=false: CPU, CUDA and a NumPy reference agree bit for bit.
# -fno-math-errno: without it sqrt keeps loops scalar. Never -ffast-math or --use_fast_math: they
# let the compiler assume that no number is infinite, and so delete the overflow check.
CXX_FLAGS = "-std=c++20 -O3 -fPIC -ffp-contract=off -fno-math-errno -fopenmp"
HIDDEN = "-fvisibility=hidden"
# Of the sources with functions for csrc/torch, which csrc/kernels.map chooses when linking. Without
# it each call within the library would have to look whether another library replaces the function.
SHOWN = "-fno-semantic-interposition"
NVCC_FLAGS = "-std=c++20 -O3 -fmad=false"
NVCC_FLAGS += f" -Xcompiler -fPIC,{SHOWN}"
# Errors for `make warnings` and CI; a user's newer compiler may have new warnings.
STRICT = os.environ.get("AMP_MP_WERROR") == "1"
WARNINGS = "-Wall -Wextra" + (" -Werror" if STRICT else "")
if not IS_X86:  # on aarch64 GCC notes how GCC 10 passed a std::pair
    WARNINGS += " -Wno-psabi"
NVCC_WARNINGS = "-Werror all-warnings" if STRICT else ""


@dataclass(frozen=True)
class Unit:
    """One compilation. A source may have several, with different flags."""

    source: Path
    command: list[str]  # the compiler and its flags
    variant: str = ""

    @property
    def name(self) -> str:
        """The object's name: cpu_loops_avx2 for cpu/loops.cpp, cpu_apply_avx2_adam."""
        if not self.source.is_relative_to(CSRC):
            return self.source.stem
        parts = self.source.relative_to(CSRC).with_suffix("").parts
        return "_".join([*parts, self.variant] if self.variant else parts)

    def object(self, folder: Path) -> Path:
        """The file that compiling makes."""
        return folder / f"{self.name}.o"

    def _recipe(self, folder: Path) -> list[str]:
        target = self.object(folder)
        depends = ["-MMD", "-MF", str(target.with_suffix(".d"))]
        return [*self.command, *depends, "-c", str(self.source), "-o", str(target)]

    def is_current(self, folder: Path) -> bool:
        """Whether the object is newer than its sources and was made by the same command."""
        target = self.object(folder)
        recipe = target.with_suffix(".cmd")
        made = recipe.read_text() if recipe.exists() else ""
        return made == str(self._recipe(folder)) and is_newer(target, target.with_suffix(".d"))

    def compile(self, folder: Path) -> None:
        """Make the object, and note the command."""
        note = self.object(folder).with_suffix(".cmd")
        note.unlink(missing_ok=True)
        run(self._recipe(folder))
        note.write_text(str(self._recipe(folder)))


def all_sets() -> list[str]:
    """The instruction sets that there are loops for, the best one first."""
    return list(INSTRUCTION_SETS) if IS_X86 else ["baseline"]


def chosen_sets() -> list[str]:
    """Those of them that AMP_MP_LOOPS names; baseline is always there."""
    wanted = os.environ.get("AMP_MP_LOOPS") or "all"
    known = all_sets()
    # For another processor, and where no program can be run to ask this one, all.
    can_ask = wanted == "here" and not is_foreign() and runs(INSTRUCTION_SETS["baseline"])
    if wanted == "all" or (wanted == "here" and not can_ask):
        return known
    if wanted == "here":
        return [isa for isa in known if runs(INSTRUCTION_SETS[isa])]
    named = wanted.split(",")
    if unknown := [isa for isa in named if isa not in known]:
        raise SystemExit(
            f"AMP_MP_LOOPS must be here, all, or names of {', '.join(known)} with commas between "
            f"them, found {unknown[0]!r}"
        )
    return [isa for isa in known if isa in named or isa == "baseline"]


def kernel_units(cuda: Cuda | None, sets: list[str]) -> list[Unit]:
    """What the library of kernels is made of. sets: the instruction sets of the loops."""
    base = [*compiler(), *CXX_FLAGS.split(), *WARNINGS.split(), f"-I{CSRC}"]
    compiled_sets = [f"-DAMP_MP_{isa.upper()}" for isa in sets if isa != "baseline"]
    listed = [Unit(CSRC / "core/rules.cpp", [*base, SHOWN])]
    listed += [Unit(CSRC / "cpu/passes.cpp", [*base, SHOWN])]
    listed += [Unit(CSRC / "cpu/select.cpp", [*base, SHOWN, *compiled_sets])]
    for isa in sets:
        flags = [*base, HIDDEN, f"-DAMP_MP_ISA={isa}"]
        if IS_X86:  # GCC 12 warns of an undefined value in its own AVX-512 header
            flags += ["-Wno-unknown-warning-option"]  # clang has not the next one
            flags += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]
            flags += [f"-march={INSTRUCTION_SETS[isa]}"]
        listed += of_families(CSRC / "cpu/apply.cpp", flags, isa)
        listed += [Unit(CSRC / f"cpu/{name}.cpp", flags, isa) for name in ("convert", "loops")]
        fused = [*flags, "-ffp-contract=fast"]  # of matrix products only
        listed.append(Unit(CSRC / "cpu/multiply.cpp", fused, isa))
    if cuda:
        # Kernels in a quarter of the bytes, or a third; the driver unpacks those that are used.
        # Drivers for CUDA 12 may not know the denser way.
        dense = int(cuda.release.split(".")[0]) >= 13
        flags = ["--compress-mode=size"] if dense else ["-Xfatbin", "-compress-all"]
        flags += [
            *cuda.host,
            *NVCC_FLAGS.split(),
            *NVCC_WARNINGS.split(),
            *cuda.architectures,
            f"-I{CSRC}",
        ]
        if os.environ.get("AMP_MP_PLAIN_QUOTIENT") == "1":
            flags.append("-DAMP_MP_PLAIN_QUOTIENT")
        for source in sorted(CSRC.glob("cuda/*.cu")):
            listed += of_families(source, [cuda.nvcc, *flags])
    else:
        listed.append(Unit(CSRC / "cuda/absent.cpp", [*base, SHOWN]))
    return listed


def of_families(source: Path, command: list[str], variant: str = "") -> list[Unit]:
    """The units of a source: one, or one for each family of rules."""
    units = []
    for family in families_of(source):
        define = [f"-DAMP_MP_FAMILY={family}"] if family else []
        name = "_".join(filter(None, (variant, family)))
        units.append(Unit(source, [*command, *define], name))
    return units


def binding_units(torch: Torch, cuda: Cuda | None, folder: Path) -> list[Unit]:
    """What the binding to a torch is made of; `folder` is for generated sources."""
    # -O1: no loop over elements is in here. -O2 takes a fifth longer to compile, and saves 0 to 3 %
    # of the time of steps of tensors of 10 elements, of casts and of loads.
    flags = CXX_FLAGS.replace("-O3", "-O1").split()
    # -DNDEBUG, as torch is compiled: pybind11 else looks for the GIL at each reference it counts.
    command = [*compiler(), *flags, "-DNDEBUG", HIDDEN, *WARNINGS.split(), f"-I{CSRC}"]
    for path in [*torch.includes, sysconfig.get_paths()["include"]]:
        command += ["-isystem", str(path)]
    about_cuda = (cuda.release, cuda.codes) if cuda else ("", "")
    facts = facts_unit(folder, torch.version, *about_cuda)
    return [Unit(source, command) for source in (torch_unit(CSRC, folder), facts)]


def compile_all(units: dict[Path, list[Unit]], jobs: int) -> dict[Path, list[Path]]:
    """Compile the units of each folder into it, but for objects that are current; returns these.

    Says before how much there is to do, after each file how far it is, and at the end how much CPU
    time it took, which other work on the machine changes less than the clock.
    """
    everything = [(folder, unit) for folder, listed in units.items() for unit in listed]
    stale = [(folder, unit) for folder, unit in everything if not unit.is_current(folder)]
    stale.sort(key=lambda pair: [not pair[1].name.startswith(begins) for begins in LONGEST])
    begun, used = time.monotonic(), cpu_seconds()
    if stale:
        print(f"{len(stale)} of {len(everything)} files to compile, {jobs} at a time", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(unit.compile, f): f"{f.name}/{unit.name}" for f, unit in stale}
        for done, future in enumerate(as_completed(waiting), 1):
            if future.exception():
                pool.shutdown(cancel_futures=True)
            future.result()
            seconds = time.monotonic() - begun
            print(f"[{done:2}/{len(stale)}] {seconds:4.0f} s  {waiting[future]}", flush=True)
    if stale:
        print(f"compiled with {cpu_seconds() - used:.0f} s of CPU time", flush=True)
    return {folder: [unit.object(folder) for unit in listed] for folder, listed in units.items()}


def cpu_seconds() -> float:
    """What the processes took that this one has started and that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def write_compile_commands(units: list[Unit], file: Path) -> None:
    """Writes the command of each source for clangd, which looks in folders that are named build.

    Sources of csrc/torch, which generated units include, have entries of their own: clangd would
    take the command of another folder's source, without torch's headers.
    """
    entries = []
    for unit in units:
        included = re.findall(r'^#include "(/.+)"$', unit.source.read_text(), re.MULTILINE)
        for source in [str(unit.source), *included]:
            arguments = [*unit.command, "-c", source]
            entries.append({"directory": str(ROOT), "file": source, "arguments": arguments})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(entries, indent=1))


def is_newer(target: Path, depends: Path) -> bool:
    """Whether an object is newer than all files that the compiler has listed in `depends`."""
    if not target.exists() or not depends.exists():
        return False
    used = depends.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    made = target.stat().st_mtime
    return all(os.path.exists(path) and os.path.getmtime(path) < made for path in used)


def count_kernels(objects: list[Path]) -> int:
    """How many CUDA kernels there are; printed, since templates can multiply them unnoticed."""
    symbols = [run(["nm", "-C", str(o)]) for o in objects if o.name.startswith("cuda_")]
    return len(set(re.findall(r"__device_stub__(\w+)\(", "".join(symbols))))


class BuildNative(build_ext):
    """setuptools' build_ext: both libraries are extensions to it, with names of their own."""

    def finalize_options(self) -> None:
        """One binding for each torch there is; none, in an sdist, is not an error yet."""
        self.torches = find_torches()
        names = [KERNELS, *(f"amp_mp.native.{torch.name}._C" for torch in self.torches)]
        self.distribution.ext_modules = [Extension(name, []) for name in names]
        super().finalize_options()

    def get_ext_filename(self, fullname: str) -> str:
        """The kernels' library belongs to no Python: its name has no tag."""
        if fullname.endswith(KERNELS.rpartition(".")[2]):
            return KERNELS.replace(".", "/") + ".so"
        return super().get_ext_filename(fullname)

    def run(self) -> None:
        """Look for everything first, then compile all, then link."""
        check_torches(self.torches)
        check_python()
        check_compiler()
        self.cuda, sets = find_cuda(self.torches), chosen_sets()
        say_what_is_built(self.torches, self.cuda, sets)
        # pip makes a new folder for every build; AMP_MP_OBJECTS names one that lasts.
        temp = ROOT / (os.environ.get("AMP_MP_OBJECTS") or self.build_temp)
        temp.mkdir(parents=True, exist_ok=True)
        units = {temp: kernel_units(self.cuda, sets)}
        for torch in self.torches:
            folder = temp / f"{torch.name}-{sys.implementation.cache_tag}"
            folder.mkdir(exist_ok=True)
            units[folder] = binding_units(torch, self.cuda, folder)
        all_units = [unit for listed in units.values() for unit in listed]
        write_compile_commands(all_units, ROOT / "build/compile_commands.json")
        self.objects = compile_all(units, int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1))
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Link one of the libraries; the kernels' is the first."""
        target = Path(self.build_lib, self.get_ext_filename(ext.name)).absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        at = [extension.name for extension in self.extensions].index(ext.name)
        objects = list(self.objects.values())[at]
        link = [*compiler(), "-shared", "-fopenmp", "-Wl,--strip-all", *map(str, objects)]
        if ext.name == KERNELS:  # --no-undefined: a symbol of torch or Python is an error
            script = f"-Wl,--version-script={CSRC / 'kernels.map'}"
            link += ["-Wl,--no-undefined", script, f"-Wl,-soname,{target.name}"]
            link += [str(self.cuda.runtime), "-lrt", "-lpthread", "-ldl"] if self.cuda else []
            made = f", {count_kernels(objects)} CUDA kernels"
        else:
            link += [f"-L{target.parents[1]}", "-lamp_mp_kernels", "-Wl,-rpath,$ORIGIN/.."]
            link += [f"-L{self.torches[at - 1].folder / 'lib'}"]
            link += ["-lc10", "-ltorch_cpu", "-ltorch_python", "-ldl"]
            made = ""
        link += ["-o", str(target)]
        run(link)
        print(f"{target.name}: {target.stat().st_size / 2**20:.2f} MiB{made}", flush=True)

    def copy_extensions_to_source(self) -> None:
        """For in-place and editable builds; bindings of a build before fit other kernels."""
        package = Path(self.get_finalized_command("build_py").get_package_dir("amp_mp"))
        shutil.rmtree(package / "native", ignore_errors=True)
        for ext in self.extensions:
            (package.parent / self.get_ext_filename(ext.name)).parent.mkdir(
                parents=True, exist_ok=True
            )
        super().copy_extensions_to_source()


def say_what_is_built(torches: list[Torch], cuda: Cuda | None, sets: list[str]) -> None:
    """Prints what was found, which is what a report of a failed build has to have."""
    versions = ", ".join(torch.version for torch in torches)
    kernels = "no CUDA kernels (AMP_MP_CUDA=1 asks for them)"
    if of_cuda := [torch.version for torch in torches if torch.cuda and not cuda]:
        kernels = (
            f"no CUDA kernels, although torch {of_cuda[0]} has CUDA (AMP_MP_CUDA=1 demands them)"
        )
    if cuda:
        kernels = f"kernels of CUDA {cuda.release} for {cuda.codes} ({cuda.nvcc})"
    loops = f"CPU loops for {', '.join(reversed(sets))}"
    if len(sets) < len(all_sets()):
        loops += " (AMP_MP_LOOPS=all asks for the rest)"
    print(
        f"building amp_mp for torch {versions}, Python {platform.python_version()}; {kernels}; "
        f"{loops}",
        flush=True,
    )
