"""A C++ compiler for test_build.py: g++ -O0, or a copy of an object that the library is made of.

Usage: CXX="python compile_without_cuda.py FOLDER". An object in FOLDER is copied if it is newer
than its sources and either none of them asks for CUDA or it was compiled without.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ASKING = ("AMP_MP_WITH_CUDA",)


def fits(made: Path) -> bool:
    """Whether an object is what a compilation without CUDA would give."""
    depends, recipe = made.with_suffix(".d"), made.with_suffix(".cmd")
    if not (made.exists() and depends.exists() and recipe.exists()):
        return False
    sources = depends.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    age = made.stat().st_mtime
    if any(not Path(s).exists() or Path(s).stat().st_mtime >= age for s in sources):
        return False
    if "-DAMP_MP_WITH_CUDA" not in recipe.read_text():
        return True
    ours = [Path(s).read_text() for s in sources if "csrc" in Path(s).parts]
    return not any(word in text for word in ASKING for text in ours)


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
