"""Metadata is in pyproject.toml, the compilation of amp_mp._C in build_tools/native.py."""

import sys
from pathlib import Path

from setuptools import Extension, setup

sys.path.insert(0, str(Path(__file__).resolve().parent))  # pip runs setup.py from another folder

from build_tools.native import BuildNative

setup(
    license="MIT",  # pyproject.toml's key for it changed with setuptools 77
    ext_modules=[Extension("amp_mp._C", [])],
    cmdclass={"build_ext": BuildNative},
)
