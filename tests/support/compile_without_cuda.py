"""A C++ compiler for test_build.py: g++ -O0, or a copy of an object that the library is made of.

Usage: CXX="python compile_without_cuda.py FOLDER". An object in FOLDER is copied if it is newer
than its sources, which are the same with CUDA and without.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from build_tools.native import is_newer


def main() -> int:
    folder, *arguments = sys.argv[1:]
    target = Path(arguments[arguments.index("-o") + 1])
    # A binding has its own folder. build_facts.o names the toolkit.
    names = [target.name, f"{target.parent.name}/{target.name}"]
    if target.suffix == ".o" and target.stem != "build_facts":
        for made in (Path(folder, name) for name in names):
            if is_newer(made, made.with_suffix(".d")):
                shutil.copy(made, target)
                return 0
    options = ["-O0" if option == "-O3" else option for option in arguments]
    return subprocess.run(["g++", *options], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
