"""Metadata is in pyproject.toml, the compilation of amp_mp._C in build_tools/native.py."""

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, __version__, setup

sys.path.insert(0, str(Path(__file__).resolve().parent))  # pip runs setup.py from another folder

from build_tools.native import BuildNative

HAS_WHEELS = any(
    importlib.util.find_spec(name) is not None
    for name in ("setuptools.command.bdist_wheel", "wheel")
)
if not HAS_WHEELS and {"dist_info", "bdist_wheel", "editable_wheel"} & set(sys.argv):
    raise SystemExit(
        f"setuptools {__version__} makes wheels with the package `wheel`, which is not installed "
        "(from setuptools 70.1 on it does so by itself):\n"
        "    pip install wheel\n"
        "    pip install --no-build-isolation ."
    )

setup(
    license="MIT",  # pyproject.toml's key for it changed with setuptools 77
    ext_modules=[Extension("amp_mp._C", [])],
    package_dir={"": "python"},  # setuptools before 61 does not read it in pyproject.toml
    cmdclass={"build_ext": BuildNative},
)
