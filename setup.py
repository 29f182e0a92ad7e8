"""Metadata is in pyproject.toml, the compilation in build_tools/native.py."""

import importlib.util
import re
import sys
from pathlib import Path

from setuptools import Extension, __version__, setup
from setuptools.command.sdist import sdist

sys.path.insert(0, str(Path(__file__).resolve().parent))  # pip runs setup.py from another folder

from build_tools.found import check_torches, find_torches
from build_tools.metadata import commit, long_description, urls
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
# Where pip asks for metadata, before it downloads another torch to replace one that does not fit.
if "dist_info" in sys.argv and (torches := find_torches()):
    check_torches(torches)


class SourceArchive(sdist):
    """An sdist that says of which commit it is, since it has no .git."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Adds the file COMMIT."""
        super().make_release_tree(base_dir, files)
        Path(base_dir, "COMMIT").write_text(commit() + "\n")


# Not in pyproject.toml: its key for a licence's SPDX name needs setuptools 77, and links need git.
VERSION_FILE = Path(__file__).resolve().parent / "python/amp_mp/_version.py"
VERSION = re.search(r'__version__ = "(.*)"', VERSION_FILE.read_text())[1]
LICENSE = "license_expression" if int(__version__.split(".")[0]) >= 77 else "license"

setup(
    **{LICENSE: "MIT"},
    long_description=long_description(VERSION),
    long_description_content_type="text/markdown",
    project_urls=urls(VERSION),
    ext_modules=[Extension("amp_mp._C", [])],  # BuildNative names those that it builds
    package_dir={"": "python"},  # setuptools before 61 does not read it in pyproject.toml
    cmdclass={"build_ext": BuildNative, "sdist": SourceArchive},
)
