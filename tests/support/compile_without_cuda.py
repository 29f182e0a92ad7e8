"""A C++ compiler for test_build.py: g++ -O0, or a copy of an object that the library is made of.

Usage: CXX="python compile_without_cuda.py FOLDER". An object in FOLDER is copied if it is newer
than its sources, which are the same with CUDA and without.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def fits(made: Path) -> bool:
    """Whether an object is what a compilation would give."""
    depends = made.with_suffix(".d")
    if not (made.exists() and depends.exists()):
        return False
    sources = depends.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    age = made.stat().st_mtime
    return all(Path(s).exists() and Path(s).stat().st_mtime < age for s in sources)


def main() -> int:
    folder, *arguments = sys.argv[1:]
    target = Path(arguments[arguments.index("-o") + 1])
    # A binding has its own folder. build_facts.o names the toolkit.
    names = [target.name, f"{target.parent.name}/{target.name}"]
    if target.suffix == ".o" and target.stem != "build_facts":
        for made in filter(fits, (Path(folder, name) for name in names)):
            shutil.copy(made, target)
            return 0
    options = ["-O0" if option == "-O3" else option for option in arguments]
    return subprocess.run(["g++", *options], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
