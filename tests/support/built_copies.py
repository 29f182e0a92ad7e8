"""Copies of the tree that are built and tested by themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("build_tools", "csrc", "python", "tests", "benchmarks", "examples")
FILES = ("setup.py", "pyproject.toml", "README.md")
# The library hardly optimised: compiling takes longer than running.
BUILD = """
import runpy, sys
from build_tools import native
native.CXX_FLAGS = native.CXX_FLAGS.replace("-O3", "-O1")
sys.argv = ["setup.py", "-q", "build_ext", "--inplace"]
runpy.run_path("setup.py", run_name="__main__")
"""


def copy_tree(copy: Path, *left_out: str) -> None:
    """Copies what a build and tests need, with its times; left_out: patterns of names.

    What was there before goes, but for folders that are not copied, as `build`.
    """
    ignored = shutil.ignore_patterns("__pycache__", "results", "*.egg-info", *left_out)
    for folder in FOLDERS:
        shutil.rmtree(copy / folder, ignore_errors=True)
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    for file in FILES:
        shutil.copy2(ROOT / file, copy / file)


def run(tree: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in the copy, with the copy's package."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "AMP_MP"))}
    env = {**kept, "PYTHONPATH": str(tree / "python"), **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)


def build(tree: Path, **environment: str) -> None:
    """Compiles what is not current, without CUDA and for one instruction set.

    Raises RuntimeError with what the compiler said.
    """
    done = run(tree, "-c", BUILD, AMP_MP_CUDA="0", AMP_MP_LOOPS="baseline", **environment)
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
