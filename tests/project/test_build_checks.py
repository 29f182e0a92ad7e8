"""What a build says before it compiles, with made-up torches, compilers and nvccs."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

import amp_mp

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from build_tools import found, metadata, native, packages, wheel  # noqa: E402

HAS_GPU = found.has_gpu()
KNOWN = {  # what `nvcc --list-gpu-arch` of a release lists
    "11.8": (70, 75, 80, 86, 90),
    "12.6": (70, 75, 80, 86, 87, 89, 90),
    "12.8": (75, 80, 86, 90, 100, 101, 120),
    "13.0": (75, 80, 86, 90, 100, 103, 110, 120, 121),
}


def tool(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


class Here:
    """A folder with made-up tools, and the variables of a build."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, monkeypatch
        self.site = folder / "site-2.13.0+cu130"

    def set(self, **variables: str) -> None:
        for name, value in variables.items():
            self.patch.setenv(name, value)

    def torches(
        self, version: str = "2.13.0+cu130", cuda: str | None = "13.0"
    ) -> list[found.Torch]:
        """What the build finds where this torch is."""
        self.set(AMP_MP_TORCH=str(torch_of(version, cuda, self.folder)))
        return found.find_torches()

    def toolkit(self, release: str) -> Path:
        """The nvcc of the toolkit that CUDA_HOME names."""
        nvcc = nvcc_of(release, self.folder / "cuda")
        self.set(CUDA_HOME=str(self.folder / "cuda"))
        return nvcc


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    return Here(tmp_path, monkeypatch)


def torch_of(version: str, cuda: str | None, folder: Path, headers: bool = True) -> Path:
    """A package torch that has its version and a folder for headers, and cannot be imported."""
    torch = folder / f"site-{version}/torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("raise ImportError('the build imports torch')")
    (torch / "version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda!r}\n")
    if headers:
        (torch / "include").mkdir()
    return torch


def nvcc_of(release: str, home: Path) -> Path:
    """A toolkit in `home` whose nvcc says what one of this release says, but compiles nothing."""
    (home / "lib64").mkdir(parents=True)
    (home / "lib64/libcudart_static.a").touch()
    known = "\\n".join(f"compute_{n}" for n in KNOWN[release])
    answers = (
        f'*--version*) echo "Cuda compilation tools, release {release}, V{release}.88" ;;',
        f'*--dryrun*) echo "#$ TOP={home}" >&2 ;;',
        f'*--list-gpu-arch*) printf "{known}\\n" ;;',
    )
    return tool(home / "bin/nvcc", "case $* in\n" + "\n".join(answers) + "\nesac")


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AMP_MP_CUDA", "AMP_MP_LOOPS", "AMP_MP_TORCH", "CUDA_HOME", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # no compiler, no nvcc
    which = found.shutil.which
    # This machine may have a toolkit where toolkits are.
    monkeypatch.setattr(
        found.shutil,
        "which",
        lambda n, path=None: None if path == "/usr/local/cuda/bin" else which(n, path=path),
    )
    monkeypatch.setattr(found.ctypes, "CDLL", driver(there=False))


def driver(there: bool) -> Callable[[str], object]:
    """What loads the driver's library on a machine that has it, or has not."""

    def load(name: str) -> object:
        if name == "libcuda.so.1" and there:
            return object()
        raise OSError(f"{name}: cannot open shared object file")

    return load


# ---- torch ---------------------------------------------------------------------------------------


def test_torch_is_read_and_never_imported(here: Here) -> None:
    (torch,) = here.torches()
    assert (torch.version, torch.cuda, torch.name) == ("2.13.0+cu130", "13.0", "torch2_13")
    found.check_torches([torch])


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0.dev1"])
def test_a_version_out_of_range_is_refused(version: str, here: Here) -> None:
    found.check_torches(here.torches("2.11.0", None))
    with pytest.raises(SystemExit, match=f"found torch {re.escape(version)}") as error:
        found.check_torches(here.torches(version, None))
    assert "pip install 'torch>=2.11,<2.16'" in str(error.value)


def test_the_range_is_that_of_the_package() -> None:
    assert f'dependencies = ["{found.RANGE}"]' in (ROOT / "pyproject.toml").read_text()


def test_pip_learns_of_the_range_before_it_downloads_another_torch(tmp_path: Path) -> None:
    """pip asks for metadata first, and would then collect a newer torch."""
    old = torch_of("2.10.0", None, tmp_path)
    environment = {**os.environ, "AMP_MP_TORCH": str(old), "PATH": "/usr/bin:/bin"}
    for command, option, refused in (("dist_info", "-o", True), ("egg_info", "-e", False)):
        arguments = [sys.executable, "setup.py", "-q", command, option, str(tmp_path)]
        done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert (done.returncode != 0) == refused, done.stderr
        assert ("found torch 2.10.0" in done.stderr) == refused


def test_without_torch_the_reason_is_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"has none:\n    pip install 'torch>=2.11,<2.16'"):
        found.check_torches([])
    for isolated in ("/tmp/pip-build-env-x1/overlay/lib", "/home/u/.cache/uv/builds-v0/.tmpx/lib"):
        monkeypatch.setattr(sys, "path", [isolated, *sys.path])
        with pytest.raises(SystemExit, match=r"builds in an environment without it") as error:
            found.check_torches([])
        assert "pip install --no-build-isolation ." in str(error.value)
        sys.path.pop(0)


def test_a_torch_without_headers_and_a_wrong_folder_are_named(here: Here) -> None:
    here.set(AMP_MP_TORCH=str(torch_of("2.12.1", None, here.folder, headers=False)))
    with pytest.raises(SystemExit, match="has no C\\+\\+ headers"):
        found.check_torches(found.find_torches())
    here.set(AMP_MP_TORCH=str(here.folder))
    with pytest.raises(SystemExit, match=r"AMP_MP_TORCH: .* is not the folder of a package torch"):
        found.find_torches()


# ---- compiler and Python.h -----------------------------------------------------------------------


def test_a_missing_compiler_is_named_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"g\+\+ cannot be started.*\n    apt install g\+\+"):
        found.check_compiler()
    monkeypatch.setenv("CXX", "clang++-99 --driver")
    with pytest.raises(SystemExit, match=r"clang\+\+-99 cannot be started .No such file"):
        found.check_compiler()


def test_a_compiler_that_is_too_old_says_what_it_said(tmp_path: Path) -> None:
    gxx = tool(
        tmp_path / "bin/g++", "echo 'g++: error: unrecognized option -std=c++20' >&2; exit 1"
    )
    with pytest.raises(SystemExit, match=r"g\+\+ cannot compile C\+\+20 .*unrecognized option"):
        found.check_compiler()
    tool(gxx, "exit 0")
    found.check_compiler()


def test_missing_headers_of_python_are_seen_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(SystemExit, match=r"Python.h.*\n    apt install python3-dev"):
        found.check_python()


def test_free_threaded_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "abiflags", "t")
    with pytest.raises(SystemExit, match=r"not tested in free-threaded Python"):
        found.check_python()
    with pytest.raises(ImportError, match=r"not tested in free-threaded Python"):
        importlib.reload(amp_mp)


# ---- CUDA ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("torch", ["2.13.0+cpu", "2.13.0+cu130", "2.11.0+cu126"])
@pytest.mark.parametrize("gpu", ["", "program", "library"])
@pytest.mark.parametrize("wanted", ["", "0", "1"])
def test_no_nvcc_is_an_error_where_a_gpu_or_the_user_asks_for_kernels(
    torch: str, gpu: str, wanted: str, here: Here
) -> None:
    cuda = {"2.13.0+cu130": "13.0", "2.11.0+cu126": "12.6"}.get(torch)
    ours = here.torches(torch, cuda)
    if gpu == "program":
        tool(here.folder / "bin/nvidia-smi", "echo 9.0")
    here.patch.setattr(found.ctypes, "CDLL", driver(there=gpu == "library"))
    here.set(AMP_MP_CUDA=wanted)
    if wanted == "0" or (wanted == "" and not (gpu and cuda)):
        assert found.find_cuda(ours) is None
        assert found.missing_nvcc(ours) is None
        return
    with pytest.raises(SystemExit, match=r", but no nvcc is in CUDA_HOME or on the PATH") as error:
        found.find_cuda(ours)
    hint, asks = str(error.value), f"torch {torch} uses CUDA {cuda}" if cuda else "AMP_MP_CUDA=1"
    assert hint.startswith(asks)
    assert "AMP_MP_CUDA=0 pip install" in hint
    assert ("'nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*'" in hint) == (cuda == "13.0")


def test_what_is_left_out_is_said_in_one_line_that_names_what_asks_for_it(
    here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = here.torches()
    native.say_what_is_built(ours, found.find_cuda(ours), native.all_sets())
    (said,) = capsys.readouterr().out.splitlines()
    assert "no CUDA kernels, although torch 2.13.0+cu130 has CUDA (AMP_MP_CUDA=1" in said
    assert "AMP_MP_LOOPS" not in said
    cpu = [dataclasses.replace(ours[0], cuda=None)]
    here.patch.setattr(native, "IS_X86", True)
    native.say_what_is_built(cpu, None, ["avx2", "baseline"])
    (said,) = capsys.readouterr().out.splitlines()
    assert "no CUDA kernels (AMP_MP_CUDA=1 asks for them)" in said
    assert said.endswith("CPU loops for baseline, avx2 (AMP_MP_LOOPS=all asks for the rest)")


def test_nvcc_of_pips_packages_is_found_beside_torch(here: Here) -> None:
    nvcc = nvcc_of("13.0", here.site / "nvidia/cu13")
    cuda = found.find_cuda(here.torches())
    assert cuda is not None
    assert (cuda.nvcc, cuda.release) == (str(nvcc), "13.0")
    assert cuda.runtime == here.site / "nvidia/cu13/lib64/libcudart_static.a"


def test_an_nvcc_newer_than_torchs_cuda_is_refused_unless_demanded(here: Here) -> None:
    here.toolkit("13.0")
    ours = here.torches("2.11.0+cu126", "12.6")
    with pytest.raises(SystemExit, match=r"is CUDA 13.0, but torch 2.11.0.cu126 uses CUDA 12.6"):
        found.find_cuda(ours)
    here.set(AMP_MP_CUDA="1")
    assert found.find_cuda(ours) is not None


@pytest.mark.parametrize(
    ("release", "codes"),
    [
        ("12.6", "sm_75 sm_80 sm_90 compute_90"),
        ("12.8", "sm_75 sm_80 sm_90 sm_100 compute_100 sm_120"),
        ("13.0", "sm_75 sm_80 sm_90 sm_100 compute_100 sm_120"),
    ],
)
def test_kernels_are_for_what_nvcc_knows(release: str, codes: str, here: Here) -> None:
    here.toolkit(release)
    cuda = found.find_cuda(here.torches())
    assert cuda is not None
    assert [flag.split("code=")[1] for flag in cuda.architectures[1::2]] == codes.split()


def test_an_nvcc_without_cpp_20_is_named(here: Here) -> None:
    here.toolkit("11.8")
    with pytest.raises(SystemExit, match=r"is CUDA 11.8, which has no C..20"):
        found.find_cuda(here.torches())


def test_a_list_of_architectures_is_checked_against_nvcc(here: Here) -> None:
    here.toolkit("12.6")
    ours = here.torches()
    for listed, message in (
        ("9.0;10.0", "asks for 10.0, which .*nvcc does not know; it knows 7.0, 7.5"),
        ("newest", "cannot read 'newest', expected like 9.0"),
    ):
        here.set(TORCH_CUDA_ARCH_LIST=listed)
        with pytest.raises(SystemExit, match=f"TORCH_CUDA_ARCH_LIST:? {message}"):
            found.find_cuda(ours)
    here.set(TORCH_CUDA_ARCH_LIST="8.0 9.0a+PTX")
    cuda = found.find_cuda(ours)
    assert cuda is not None
    assert cuda.architectures[-1] == "arch=compute_90a,code=compute_90a"


def test_a_compiler_that_is_too_new_for_nvcc_is_named(here: Here) -> None:
    nvcc = here.toolkit("13.0")
    said = "host_config.h:154:2: error: #error -- unsupported GNU version! gcc 16"
    refuses = f'*-ccbin*) ;;\n*"-x cu"*) echo "{said}" >&2; echo more >&2; exit 1 ;;'
    nvcc.write_text(nvcc.read_text().replace("case $* in", f"case $* in\n{refuses}"))
    ours = here.torches()
    with pytest.raises(SystemExit, match=r"does not work with g\+\+: .*unsupported GNU") as error:
        found.find_cuda(ours)
    assert "CXX=g++-14 pip install" in str(error.value)
    here.set(CXX="g++-14")
    cuda = found.find_cuda(ours)
    assert cuda is not None
    assert cuda.host == ["-ccbin", "g++-14"]


def test_an_nvcc_without_its_runtime_or_that_is_none_is_named(here: Here) -> None:
    nvcc, ours = here.toolkit("13.0"), here.torches()
    (here.folder / "cuda/lib64/libcudart_static.a").unlink()
    with pytest.raises(SystemExit, match=r"libcudart_static.a not found under"):
        found.find_cuda(ours)
    tool(nvcc, "echo hello")
    with pytest.raises(SystemExit, match=r"does not answer like a CUDA compiler"):
        found.find_cuda(ours)


# ---- another processor ---------------------------------------------------------------------------


@pytest.fixture
def for_other(monkeypatch: pytest.MonkeyPatch) -> str:
    """A processor that this machine has not, and what wheel.py sets to build for it."""
    other = "aarch64" if wheel.HOST != "aarch64" else "x86_64"
    for name, value in wheel.foreign(other).items():
        monkeypatch.setenv(name, value)
    return other


def test_another_processor_takes_its_own_compiler_tags_and_cuda_runtime(
    for_other: str, here: Here
) -> None:
    assert (found.machine(), found.is_foreign()) == (for_other, True)
    assert os.environ["SETUPTOOLS_EXT_SUFFIX"].endswith(f"-{for_other}-linux-gnu.so")
    here.toolkit("13.0")  # which has this machine's
    ours = here.torches()
    with pytest.raises(SystemExit, match=f"{re.escape(str(here.site))} for {for_other}"):
        found.find_cuda(ours)
    (here.site / "nvidia/cu13/lib").mkdir(parents=True)
    (here.site / "nvidia/cu13/lib/libcudart_static.a").touch()
    cuda = found.find_cuda(ours)
    assert cuda is not None
    assert cuda.runtime == here.site / "nvidia/cu13/lib/libcudart_static.a"
    headers = ["-isystem", str(here.folder / "cuda/include")]
    assert cuda.host == ["-ccbin", f"{for_other}-linux-gnu-g++", *headers]
    options = wheel.for_machine(for_other)
    assert {f"manylinux_2_28_{for_other}", "--only-binary=:all:"} <= {*options}
    assert wheel.for_machine(wheel.HOST) == []


def test_python_headers_of_this_processor_alone_are_named(for_other: str, tmp_path: Path) -> None:
    gxx = f"{for_other}-linux-gnu-g++"
    tool(tmp_path / f"bin/{gxx}", "echo 'aarch64-linux-gnu/pyconfig.h: No such file' >&2; exit 1")
    with pytest.raises(SystemExit, match=f"are not for {for_other}.*\n.*pyconfig.h: No such file"):
        found.check_python()
    tool(tmp_path / f"bin/{gxx}", "exit 0")
    found.check_python()


# ---- what a release says of itself ---------------------------------------------------------------


def test_the_commit_is_gits_or_that_of_the_sdist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AMP_MP_COMMIT", raising=False)
    monkeypatch.setattr(metadata, "ROOT", tmp_path)
    assert metadata.commit() == ""
    (tmp_path / "COMMIT").write_text("abc123\n")
    assert metadata.commit() == "abc123"
    (tmp_path / ".git").mkdir()
    assert metadata.commit() == ""  # PATH has no git
    monkeypatch.setenv("AMP_MP_COMMIT", "named")
    assert metadata.commit() == "named"


def test_gits_commit_says_what_differs_and_is_not_that_of_a_folder_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AMP_MP_COMMIT", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(metadata, "ROOT", tmp_path)
    (tmp_path / "file").write_text("1")
    who = ["git", "-c", "user.name=x", "-c", "user.email=x@x"]
    for arguments in (["init", "-q"], ["add", "file"], ["commit", "-qm", "x"]):
        subprocess.run([*who, *arguments], cwd=tmp_path, check=True)
    (tmp_path / "COMMIT").write_text("older\n")
    head = metadata.commit()
    assert re.fullmatch(r"[0-9a-f]{12}", head)
    (tmp_path / "file").write_text("2")
    assert metadata.commit() == head + "+changes"
    (tmp_path / "inside").mkdir()
    monkeypatch.setattr(metadata, "ROOT", tmp_path / "inside")
    assert metadata.commit() == ""


def test_the_description_on_an_index_has_no_relative_links(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readme = (ROOT / "README.md").read_text()
    links = re.findall(r"(?<!!)\[[^\]]*\]\((?!https?://)", readme)  # pictures are left out
    monkeypatch.setenv("AMP_MP_HOME", "git@example.org:some/amp_mp.git")
    text = metadata.long_description("0.3.0")
    assert len(links) > 10
    assert text.count("(https://example.org/some/amp_mp/blob/v0.3.0/") == len(links)
    assert "https://example.org/some/amp_mp/blob/v0.3.0/docs/formats.md" in text
    assert metadata.urls("0.3.0")["Issues"] == "https://example.org/some/amp_mp/issues"
    monkeypatch.setattr(metadata, "home", lambda: "")
    assert not re.search(r"\]\((?!https?://)", metadata.long_description("0.3.0"))
    assert metadata.urls("0.3.0") == {}


# ---- variables that are set and empty, as CI systems and Dockerfiles set them --------------------


def settings(folder: Path, nvcc: str, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the builds make of their environment."""
    of_wheel = {}

    def run(*_: object, **environment: str) -> None:
        of_wheel.update(environment)
        (folder / "build/wheel-raw").mkdir(parents=True)
        (folder / "build/wheel-raw/amp_mp.whl").touch()

    monkeypatch.setattr(wheel, "ROOT", folder)
    monkeypatch.setattr(wheel, "run", run)
    wheel.build(Path(sys.executable), [], "x86_64")
    command = ["/usr/bin/make", "-nB", "build", "warnings", "test-streams"]
    make = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return [
        found.compiler(),
        found.host_compiler(folder),
        [torch.folder for torch in found.find_torches()],
        found.find_nvcc([]),
        found.missing_nvcc([]),
        found.architecture_flags(nvcc),
        native.chosen_sets(),
        (metadata.commit(), metadata.home()),
        of_wheel,
        make.stdout + make.stderr,
    ]


VARIABLES = (
    "AMP_MP_TORCH AMP_MP_CUDA AMP_MP_LOOPS AMP_MP_OBJECTS AMP_MP_COMMIT AMP_MP_HOME CXX CUDA_HOME"
)
VARIABLES += " MAX_JOBS TORCH_CUDA_ARCH_LIST PYTHON TORCH JOBS SEEDS FIRST COMPILERS"


@pytest.mark.slow
def test_an_empty_variable_counts_as_unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = str(nvcc_of("13.0", tmp_path / "toolkit"))
    tool(tmp_path / "bin/python3", f'exec {sys.executable} "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    for name in VARIABLES.split():
        monkeypatch.delenv(name, raising=False)
    unset = settings(tmp_path, nvcc, monkeypatch)
    for name in VARIABLES.split():
        monkeypatch.setenv(name, "")
    assert settings(tmp_path, nvcc, monkeypatch) == unset


# ---- what is compiled ----------------------------------------------------------------------------

# In both, csrc/torch is compiled for each torch.
ALWAYS = {"core_rules", "cpu_passes", "cpu_select"}
FAMILIES = ("adam", "adaptive", "layerwise", "muon", "rmsprop", "sgd")
KERNELS = {f"cuda_apply_{family}" for family in FAMILIES}
KERNELS |= {
    f"cuda_{name}"
    for name in ["average", "changed", "compare", "copy", "decide", "float8", "measure", "runtime"]
}
KERNELS |= {"cuda_step", "cuda_step_table"}
NO_KERNELS = {"cuda_absent"}


def loops(*sets: str) -> set[str]:
    """The names of the units with loops for these instruction sets."""
    units = {f"cpu_{source}_{isa}" for source in ("convert", "loops", "multiply") for isa in sets}
    return units | {f"cpu_apply_{isa}_{family}" for isa in sets for family in FAMILIES}


def asked_by_make(gpu: bool, here: Here) -> dict[str, str]:
    """The variables that `make build` gives the build, on a machine with a GPU or without."""
    tool(here.folder / "bin/nvidia-smi", "echo 9.0" if gpu else "exit 9")
    path = f"{here.folder}/bin:/usr/bin:/bin"
    command = ["make", "--dry-run", "--always-make", "build/asked"]
    done = subprocess.run(command, cwd=ROOT, env={"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r'(\w+)="?([\w.]+)', done.stdout.split("echo")[1]))


@pytest.mark.parametrize(
    ("who", "processor", "wanted"),
    [
        ("make", "avx512", NO_KERNELS | loops("baseline", "avx2", "avx512")),
        ("make", "avx2", NO_KERNELS | loops("baseline", "avx2")),
        ("make", "baseline", NO_KERNELS | loops("baseline")),
        ("make", "aarch64", NO_KERNELS | loops("baseline")),
        ("make with a GPU", "avx2", KERNELS | loops("baseline", "avx2")),
        ("make with everything", "avx2", KERNELS | loops("baseline", "avx2", "avx512")),
        ("pip", "avx2", KERNELS | loops("baseline", "avx2", "avx512")),
        ("pip without nvcc", "baseline", NO_KERNELS | loops("baseline", "avx2", "avx512")),
        ("pip", "aarch64", KERNELS | loops("baseline")),
        ("wheel", "baseline", KERNELS | loops("baseline", "avx2", "avx512")),
    ],
)
def test_units(who: str, processor: str, wanted: set[str], here: Here) -> None:
    best = {"avx2": ["x86-64-v3"], "avx512": ["x86-64-v3", "x86-64-v4"]}.get(processor, [])
    here.patch.setattr(native, "IS_X86", processor != "aarch64")
    here.patch.setattr(native, "runs", lambda level: level in ["x86-64", *best])
    if who != "pip without nvcc":
        here.toolkit("13.0")
    if who.startswith("make"):
        here.set(**asked_by_make(who == "make with a GPU", here))
    if who == "make with everything":  # as .ci/run exports them
        here.set(AMP_MP_CUDA="1", AMP_MP_LOOPS="all")
    if who == "wheel":
        here.set(AMP_MP_CUDA="1")  # wheel.build
    units = native.kernel_units(found.find_cuda(here.torches()), native.chosen_sets())
    assert {unit.name for unit in units} == ALWAYS | wanted
    assert len(units) == len(ALWAYS | wanted)
    (select,) = (unit.command for unit in units if unit.name == "cpu_select")
    compiled = {option[9:] for option in select if option.startswith("-DAMP_MP_")}
    assert compiled == {isa.upper() for isa in ("avx2", "avx512") if loops(isa) <= wanted}


def test_unknown_sets_of_loops_are_refused(here: Here) -> None:
    here.patch.setattr(native, "IS_X86", True)
    here.set(AMP_MP_LOOPS="avx2,avx1024")
    with pytest.raises(SystemExit, match=r"AMP_MP_LOOPS must be here, all, .*found 'avx1024'"):
        native.chosen_sets()
    here.set(AMP_MP_LOOPS="avx2")
    assert native.chosen_sets() == ["avx2", "baseline"]


def test_all_loops_are_compiled_where_the_processor_cannot_be_asked(here: Here) -> None:
    here.patch.setattr(native, "IS_X86", True)
    here.set(AMP_MP_LOOPS="here")
    tool(here.folder / "bin/g++", ': > "$5"')  # what it makes cannot be started
    assert not found.runs("x86-64")
    assert native.chosen_sets() == ["avx512", "avx2", "baseline"]


def test_a_processor_runs_what_the_library_chooses_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMP_MP_LOOPS=here compiles the set that is taken where all are compiled."""
    monkeypatch.undo()  # this machine's compiler
    if not native.IS_X86:
        pytest.skip("other processors have one set of loops")
    assert found.runs("x86-64")
    best = next(isa for isa, level in native.INSTRUCTION_SETS.items() if found.runs(level))
    assert os.environ.get("AMP_MP_CPU") or amp_mp.build_info()["cpu"] == best


# ---- the environment of `make` -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["python3", "venv", "Python.h", "g++"])
def test_make_names_what_is_missing_before_it_downloads(missing: str, tmp_path: Path) -> None:
    real = f'exec {sys.executable} "$@"'
    refuses = {"venv": "*ensurepip*) exit 1 ;;", "Python.h": '*Python.h*) echo "/nowhere" ;;'}
    if missing != "python3":
        text = f'case "$*" in {refuses.get(missing, "")}\n *) {real} ;; esac'
        tool(tmp_path / "bin/python3", text)
    if missing != "g++":
        tool(tmp_path / "bin/g++", "exit 0")
    done = subprocess.run(
        ["/bin/bash", ".ci/environment", "python3", str(tmp_path / "venv"), "2.13.0"],
        cwd=ROOT,
        env={"PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert missing in done.stderr
    assert "apt install python3 python3-venv python3-dev g++ make" in done.stderr
    assert not (tmp_path / "venv").exists()


def made_environment(folder: Path, index: bool, gpu: bool, torch: str) -> list[str]:
    """The pip commands that .ci/environment runs where pip installs this torch, and installs it.

    index: torch's own index answers. gpu: the machine has one.
    """
    cuda = torch.partition("+cu")[2]
    site = torch_of(torch, f"{cuda[:-1]}.{cuda[-1]}" if cuda else None, folder).parent
    log = folder / "pip"
    # The Python that `make` is given, and that of the environment which it makes.
    python = f"""case "$*" in
  *ensurepip* | *setuptools* | *hypothesis*) exit 0 ;;
  *Python.h*) echo / ;;
  *urlopen*) exit {int(not index)} ;;
  "-c import torch") exit 1 ;;
  "-m venv "*) mkdir -p $3/bin; cp $0 $3/bin/python ;;
  "-m pip "*) echo "$*" >> {log} ;;
  *) PYTHONPATH={site} exec {sys.executable} "$@" ;; esac"""
    tool(folder / "bin/python3", python)
    tool(folder / "bin/g++", "exit 0")
    if gpu:
        tool(folder / "bin/nvidia-smi", "echo 9.0")
    for name in ("mkdir", "cp"):
        (folder / f"bin/{name}").symlink_to(f"/bin/{name}")
    arguments = [".ci/environment", "python3", str(folder / "venv"), "2.13.0"]
    environment = {"PATH": str(folder / "bin"), "AMP_MP_TORCH": str(site / "torch")}
    # As if neither the driver nor a toolkit were there, whatever this machine has.
    environment["CUDA_HOME"] = str(folder)
    done = subprocess.run(
        ["/bin/bash", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return log.read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("gpu", [True, False])
def test_make_takes_a_cpu_build_of_torch_where_no_gpu_is(
    index: bool, gpu: bool, tmp_path: Path
) -> None:
    if HAS_GPU and not gpu:
        pytest.skip("this machine has a GPU")
    first, *_ = made_environment(tmp_path, index, gpu, "2.13.0+cpu")
    assert "torch==2.13.0" in first
    asked = "--extra-index-url https://download.pytorch.org/whl/cpu" in first
    assert asked == (index and not gpu)


def test_what_make_installs_is_in_the_lists_of_pyproject() -> None:
    named = [
        lists.split()
        for file in ("Makefile", ".ci/environment")
        for lists in re.findall(r"build_tools/packages\.py ([a-z ]+)", (ROOT / file).read_text())
    ]
    assert len(named) == 4
    assert all(packages.packages(*lists) for lists in named)
    assert "setuptools>=64" in packages.packages("build")


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [True, False])
def test_make_installs_nvcc_where_a_gpu_and_torch_ask_for_it(gpu: bool, tmp_path: Path) -> None:
    if HAS_GPU and not gpu:
        pytest.skip("this machine has a GPU")
    commands = made_environment(tmp_path, False, gpu, "2.13.0+cu130")
    packages = "nvidia-cuda-nvcc==13.0.* nvidia-nvvm==13.0.* nvidia-cuda-crt==13.0.*"
    assert [packages in command for command in commands].count(True) == int(gpu)
