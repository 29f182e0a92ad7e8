"""Builds amp_mp for this GPU, in place, unless that has been done: `make gpu`'s parts share it.

Times of files are not looked at, since copying a tree changes them: what counts is the content of
the sources and of the library, torch's and CUDA's versions, and the architecture.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_environment import NATIVE, ROOT, digest


def library(root: Path = ROOT) -> str | None:
    """A digest of the libraries that are in place; None if there is none."""
    found = sorted((root / "python/amp_mp/native").rglob("*.so"))
    content = b"".join(path.name.encode() + path.read_bytes() for path in found)
    return hashlib.sha256(content).hexdigest() if found else None


SETTINGS = ("CUDA_HOME", "CXX", "AMP_MP_PLAIN_QUOTIENT")  # of the environment


def wanted(environment: dict[str, Any]) -> dict[str, Any]:
    """What the library depends on."""
    names = ("python", "torch", "cuda")
    settings = {name: os.environ.get(name) or None for name in SETTINGS}
    native = {"native": digest(NATIVE), "architectures": architectures(environment)}
    return {**{name: environment[name] for name in names}, **settings, **native}


def architectures(environment: dict[str, Any]) -> str:
    """TORCH_CUDA_ARCH_LIST; without it, that of this GPU."""
    found = os.environ.get("TORCH_CUDA_ARCH_LIST") or environment["capability"]
    if not found:
        raise SystemExit("no GPU to build for: name architectures in TORCH_CUDA_ARCH_LIST")
    return str(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("environment", type=Path, help="what gpu_environment.py has written")
    parser.add_argument("note", type=Path, help="file that says what has been built")
    arguments = parser.parse_args()
    now = wanted(json.loads(arguments.environment.read_text()))
    built = json.loads(arguments.note.read_text()) if arguments.note.exists() else None
    if built is not None and built == {**now, "library": library()}:
        print("the library is there already")
        return
    arguments.note.unlink(missing_ok=True)
    settings = {
        "AMP_MP_CUDA": "1",
        "AMP_MP_LOOPS": "here",
        "AMP_MP_OBJECTS": "build/gpu_objects",  # what is compiled when time runs out stays
        "TORCH_CUDA_ARCH_LIST": now["architectures"],
        "MAX_JOBS": os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1),
    }
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings})
    if done.returncode == 0 and library() is None:
        raise SystemExit("setup.py ended well, but python/amp_mp/native has no library")
    if done.returncode:
        raise SystemExit(done.returncode)
    arguments.note.write_text(json.dumps({**now, "library": library()}) + "\n")


if __name__ == "__main__":
    main()
