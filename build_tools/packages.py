"""Prints packages of pyproject.toml, one a line: `python build_tools/packages.py test lint`.

The names of lists are those of its optional-dependencies, and `build` for what building needs. pip
reads lists of pyproject.toml by itself (--group) only from version 25.1 on.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def packages(*lists: str) -> list[str]:
    """The requirements of these lists, as pip takes them."""
    read = tomllib.loads((ROOT / "pyproject.toml").read_text())
    known = {"build": read["build-system"]["requires"], **read["project"]["optional-dependencies"]}
    return [package for name in lists for package in known[name]]


if __name__ == "__main__":
    print(*packages(*sys.argv[1:]), sep="\n")
