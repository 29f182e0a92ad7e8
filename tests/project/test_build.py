"""How the package is built and imported: without CUDA, under another torch, by mistake."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import compile_without_cuda
import pytest
import torch
from forked import Script, run_each

import amp_mp as amp

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(amp.__file__).parent
sys.path.append(str(ROOT))

from build_tools import found, native  # noqa: E402


def run(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Code that finds the package in another folder."""
    (done,) = run_each([Script(["-c", f"import sys; sys.path[:0] = [{str(path)!r}]\n{code}"])])
    return done


def test_build_info_names_what_was_built() -> None:
    info = amp.build_info()
    assert info["torch"].split(".")[:2] == torch.__version__.split(".")[:2]
    assert re.fullmatch(r"|[0-9a-f]{12}(\+changes)?", info["commit"])
    assert info["cpu"] in ("baseline", "avx2", "avx512")
    assert isinstance(info["cuda"], bool)
    if info["cuda"]:
        assert re.fullmatch(r"\d+\.\d+", info["cuda_toolkit"])
        assert "sm_" in info["cuda_architectures"]


def test_clangd_gets_the_command_of_every_source(tmp_path: Path) -> None:
    """Those of csrc/torch too, which are compiled as parts of generated units."""
    csrc = ROOT / "csrc"
    of_torch = found.Torch(tmp_path / "torch", "2.13.0", None)
    units = native.kernel_units(None, native.all_sets())
    units += native.binding_units(of_torch, None, tmp_path)
    native.write_compile_commands(units, tmp_path / "build/compile_commands.json")
    entries = json.loads((tmp_path / "build/compile_commands.json").read_text())
    commands = {Path(entry["file"]): entry["arguments"] for entry in entries}
    assert {*csrc.rglob("*.cpp")} <= commands.keys()
    for source, command in commands.items():
        assert command[-2:] == ["-c", str(source)]
        assert f"-I{csrc}" in command
        of_kernels = source.is_relative_to(csrc) and not source.is_relative_to(csrc / "torch")
        assert (str(tmp_path / "torch/include") in command) != of_kernels


@pytest.mark.slow
def test_importing_touches_no_cuda() -> None:
    code = "import amp_mp, torch; assert not torch.cuda.is_initialized()"
    (done,) = run_each([Script(["-c", code], {"CUDA_VISIBLE_DEVICES": ""})])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_another_torch_or_python_is_one_clear_import_error(tmp_path: Path) -> None:
    """What is there is named; a binding for another Python of the same torch does not count."""
    copied = tmp_path / "amp_mp"
    shutil.copytree(PACKAGE, copied)
    (own,) = copied.glob("native/torch*/_C*.so")
    suffixes = own.name.removeprefix("_C")
    for version, suffix in (("2_3", suffixes), ("2_12", suffixes)):
        (copied / f"native/torch{version}").mkdir()
        (copied / f"native/torch{version}/_C{suffix}").touch()
    own.rename(own.with_name("_C.cpython-38-x86_64-linux-gnu.so"))
    done = run("import amp_mp", tmp_path)
    assert f"has a native library for torch 2.12, 2.3, but torch {torch.__version__}" in done.stderr
    assert "pip install --no-build-isolation --no-cache-dir --force-reinstall" in done.stderr
    shutil.rmtree(copied / "native")
    assert "a native library for torch (none)" in run("import amp_mp", tmp_path).stderr


def test_the_kernels_know_neither_torch_nor_python() -> None:
    """One file then serves every version of both, and nothing of it can clash with theirs."""
    kernels = PACKAGE / "native/libamp_mp_kernels.so"
    symbols = subprocess.run(["nm", "-DC", kernels], capture_output=True, text=True, check=True)
    shown = [line[19:] for line in symbols.stdout.splitlines() if line[:16].strip()]
    assert len(shown) > 20
    ours = ("amp_mp::cpu::", "amp_mp::cuda::", "amp_mp::rules()", "amp_mp::rule_named(")
    assert [name for name in shown if not any(our in name for our in ours)] == []
    foreign = r"\b(c10|at|torch|pybind11)::|\bPy[A-Z_]"
    assert [line for line in symbols.stdout.splitlines() if re.search(foreign, line)] == []
    needed = subprocess.run(["readelf", "-d", kernels], capture_output=True, text=True, check=True)
    assert not re.search(r"NEEDED.*(torch|c10|python|cuda)", needed.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"AMP_MP_CUDA": "yes"}, "AMP_MP_CUDA must be 0 or 1, found 'yes'"),
        ({"AMP_MP_TORCH": "/nowhere"}, "/nowhere is not the folder of a package torch"),
        ({"CXX": "g++-99"}, "g++-99 cannot be started"),
    ],
    ids=["AMP_MP_CUDA", "AMP_MP_TORCH", "CXX"],
)
def test_a_wrong_build_setting_is_refused_by_name(
    tmp_path: Path, environment: dict[str, str], message: str
) -> None:
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path)]
    env = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
@pytest.mark.slow
def test_a_build_without_cuda_works_and_says_so(tmp_path: Path) -> None:
    """Only what may differ from the libraries that `make` has built is compiled."""
    compiler = [sys.executable, compile_without_cuda.__file__, str(ROOT / "build/native")]
    env = {**os.environ, "AMP_MP_CUDA": "0", "CXX": shlex.join(compiler)}
    command = [sys.executable, "setup.py", "build"]
    command += ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "0 CUDA kernels" in built.stdout
    code = (
        "import amp_mp as amp, torch\n"
        "assert not amp.build_info()['cuda'] and str(amp.__file__).startswith({0!r})\n"
        "p = torch.nn.Parameter(torch.ones(3).bfloat16()); p.grad = torch.ones_like(p)\n"
        "amp.optim.AdamW([p], lr=0.5, max_grad_norm=1.0).step()\n"
        "assert p.tolist() != [1, 1, 1]\n"
    )
    done = run(code.format(str(tmp_path)), tmp_path / "lib")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_an_old_setuptools_without_wheel_is_one_clear_error() -> None:
    """Python 3.11's own setuptools, 65.5, makes wheels with the package `wheel`."""
    code = (
        "import importlib.util, runpy, sys\n"
        "real, hidden = importlib.util.find_spec, ('wheel', 'setuptools.command.bdist_wheel')\n"
        "importlib.util.find_spec = lambda name, *rest: None if name in hidden else real(name)\n"
        "sys.argv = ['setup.py', 'dist_info']\n"
        f"runpy.run_path({str(ROOT / 'setup.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "pip install wheel" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_setuptools_that_reads_no_pyproject_finds_the_package() -> None:
    """Ubuntu 22.04's, 59.6, is one; the arguments of setup() are all that it knows."""
    code = (
        "from setuptools import Distribution\n"
        "Distribution.parse_config_files = lambda *_, **__: None\n"
        "from distutils.core import run_setup\n"
        "build = run_setup('setup.py', ['-q'], stop_after='config').get_command_obj('build_py')\n"
        "build.ensure_finalized()\n"
        "print(build.get_package_dir('amp_mp'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "python/amp_mp", done.stderr


@pytest.mark.slow
def test_an_sdist_has_what_a_clone_has_and_knows_its_commit(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "sdist", "-d", str(tmp_path)]
    command += ["egg_info", "-e", str(tmp_path)]
    environment = {**os.environ, "AMP_MP_COMMIT": "abc123", "AMP_MP_TORCH": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / f"amp_mp-{amp.__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        commit = archive.extractfile(f"amp_mp-{amp.__version__}/COMMIT")
        assert commit is not None
        assert commit.read() == b"abc123\n"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    ours = [name for name in listed.stdout.split() if not name.startswith((".git", ".pre-"))]
    assert [name for name in ours if name not in names] == []
    assert [name for name in names if re.search(r"\.(so|o|pyc)$|^(build|\.venv|dist)/", name)] == []
