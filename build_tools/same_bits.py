"""Tells whether the working tree computes the bits of another commit, in one table.

    .venv/bin/python build_tools/same_bits.py HEAD~3    # make same-bits BASE=HEAD~3

Builds the commit, without CUDA kernels, in build/same_bits/COMMIT, which stays: a second run
compiles nothing. Then both packages run the trainings of this tree's tests/support/trainings.py:
every optimizer and wrapper, in every format and dtype, with clipping, an overflow and a state dict
that is loaded. A row is an optimizer, a rule or a wrapper, a column a format; each cell is

    same       every byte of weights and states
    DIFFERS    below the table is the first tensor that differs, with both values
    new, gone  only the working tree, or only the commit, can do it
    error      both raise one

The status is 0 if nothing differs, is new or is gone. --sets compares under several AMP_MP_CPU, one
table each. Products are those of AMP_MP_PRODUCTS=float32, since "auto" measures what is faster.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
BUILDS = ROOT / "build/same_bits"
SCRIPT = ROOT / "tests/support/write_bits.py"

Bits = tuple[str, tuple[int, ...], bytes]  # dtype, shape, bytes
Found = dict[str, Bits] | str  # tensors by name, or an error
Case = tuple[str, str]  # row and column of the table
Result = tuple[str, str, Found]


# ---- the commit and its library ------------------------------------------------------------------


def commit_of(base: str) -> str:
    """The hash of a commit, branch or tag; SystemExit if there is none."""
    command = ["git", "rev-parse", "--verify", "--quiet", "--end-of-options", f"{base}^{{commit}}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"BASE={base} is no commit, branch or tag of this repository")
    return done.stdout.strip()


def tree_of(commit: str) -> Path:
    """The commit's files; unpacked once."""
    tree = BUILDS / commit
    if not tree.exists():
        BUILDS.mkdir(parents=True, exist_ok=True)
        archive = ["git", "archive", "--prefix=tree/", commit]
        files = subprocess.run(archive, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        with tempfile.TemporaryDirectory(dir=BUILDS) as folder:
            subprocess.run(["tar", "-x", "-C", folder], input=files, check=True)
            Path(folder, "tree").rename(tree)
    return tree


def build(tree: Path, jobs: str, sets: list[str]) -> None:
    """Compiles what is not compiled yet, as the commit itself does it."""
    environment = {
        **cleaned(),
        "AMP_MP_CUDA": "0",
        "AMP_MP_OBJECTS": "build/native",
        "AMP_MP_COMMIT": tree.name[:12],
        "MAX_JOBS": jobs,
    }
    if not sets:
        environment["AMP_MP_LOOPS"] = "here"  # for this processor's instructions alone
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    if subprocess.run(command, cwd=tree, env=environment).returncode:
        raise SystemExit(f"{tree} could not be built; what the compiler says is above")


def cleaned() -> dict[str, str]:
    """The environment without what changes a build, a package or its bits."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("AMP_MP", "PYTHON"))}


# ---- what both compute ---------------------------------------------------------------------------


def start(tree: Path, cpu: str, rows: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process that runs the trainings with the package of a tree."""
    environment = {
        **cleaned(),
        "PYTHONPATH": str(tree / "python"),
        "AMP_MP_CPU": cpu,
        "AMP_MP_PRODUCTS": "float32",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, SCRIPT, *rows]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)


def read(process: subprocess.Popen[bytes]) -> Iterator[Any]:
    """The objects that it writes; SystemExit if it fails."""
    assert process.stdout is not None
    while True:
        try:
            yield pickle.load(process.stdout)
        except EOFError:
            break
    if process.wait():
        raise SystemExit(f"the trainings ended with status {process.returncode}")


def compare_trees(base: Path, here: Path, cpu: str = "", rows: Sequence[str] = ()) -> bool:
    """Prints the table of two trees; returns whether all is the same.

    cpu: an instruction set, or the best that each has. rows: all if there are none. SystemExit
    where a package cannot be imported, or lies in another folder.
    """
    with start(base, cpu, rows) as of_base, start(here, cpu, rows) as of_here:
        results = []
        for tree, process in ((base, of_base), (here, of_here)):
            stream = read(process)
            file, found = next(stream)
            if not Path(file).is_relative_to(tree):
                raise SystemExit(f"amp_mp was imported from {file}, not from {tree}")
            print(f"{found}: {tree}", flush=True)
            results.append(stream)
        words, lines = compare(*results)
    print("", *table(words), "", *lines, sep="\n")
    counts = Counter(words.values())
    print(", ".join(f"{count} {word}" for word, count in counts.items()), flush=True)
    return counts.keys() <= {"same", "error"}


# ---- the comparison ------------------------------------------------------------------------------


def compare(base: Iterable[Result], here: Iterable[Result]) -> tuple[dict[Case, str], list[str]]:
    """The word of each case, and a line for each that needs one."""
    words: dict[Case, str] = {}
    texts: dict[Case, str] = {}
    only: tuple[dict[Case, Found], ...] = ({}, {})  # what has not come from the other side yet
    for both in zip_longest(base, here):
        for side, result in enumerate(both):
            if result is None:
                continue
            *where, found = result
            case = where[0], where[1]
            words.setdefault(case, "")
            only[side][case] = found
            if case in only[1 - side]:
                words[case], texts[case] = judge(*(each.pop(case) for each in only))
    for word, cases in zip(("gone", "new"), only, strict=True):
        words |= dict.fromkeys(cases, word)
    lines = [
        f"{words[case]}  {case[0]}, {case[1]}: {texts[case]}" for case in words if texts.get(case)
    ]
    return words, lines


def judge(base: Found, here: Found) -> tuple[str, str]:
    """The word of a case that both sides have tried, and what there is to say of it."""
    if isinstance(base, str):
        return ("error", here) if isinstance(here, str) else ("new", f"BASE raises {base}")
    if isinstance(here, str):
        return "gone", f"the working tree raises {here}"
    difference = first_difference(base, here)
    return ("DIFFERS", difference) if difference else ("same", "")


def first_difference(base: dict[str, Bits], here: dict[str, Bits]) -> str:
    """The first tensor that differs; "" if none does."""
    for name in base | here:
        if base.get(name) == here.get(name):
            continue
        if name not in base or name not in here:
            return f"{name}: only in {'BASE' if name in base else 'the working tree'}"
        (dtype, shape, old), (other_dtype, other_shape, new) = base[name], here[name]
        if (dtype, shape) != (other_dtype, other_shape):
            return f"{name}: {dtype} {shape} in BASE, {other_dtype} {other_shape} here"
        size = len(old) // prod(shape)
        rows = [np.frombuffer(data, np.uint8).reshape(-1, size) for data in (old, new)]
        wrong = np.flatnonzero((rows[0] != rows[1]).any(1))
        at = tuple(int(i) for i in np.unravel_index(wrong[0], shape))
        was, found = (number(dtype, each[wrong[0]].tobytes()) for each in rows)
        return f"{name}{list(at)}: {was} in BASE, {found} here; {len(wrong)} of {prod(shape)}"
    return ""


def number(dtype: str, data: bytes) -> str:
    """An element's value and its bits."""
    wide = b"\0\0" + data if dtype == "bfloat16" else data  # float32 has the same upper half
    (value,) = np.frombuffer(wide, "float32" if dtype == "bfloat16" else dtype)
    return f"{value!s} (0x{data[::-1].hex()})"


def table(words: dict[Case, str]) -> list[str]:
    """Its lines; a case that there is not stays empty."""
    rows, columns = (list(dict.fromkeys(case[i] for case in words)) for i in (0, 1))
    cells = [["", *columns], *([row, *(words.get((row, c), "") for c in columns)] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


def main() -> None:
    """What the text above says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="a commit, branch or tag")
    parser.add_argument("--sets", nargs="+", default=[], choices=("baseline", "avx2", "avx512"))
    parser.add_argument("--rows", nargs="+", default=[], help="of the table; default: all")
    parser.add_argument("--jobs", default="2", help="compilers at a time; default: %(default)s")
    arguments = parser.parse_args()
    tree = tree_of(commit_of(arguments.base))
    build(tree, arguments.jobs, arguments.sets)
    same = [compare_trees(tree, ROOT, cpu, arguments.rows) for cpu in arguments.sets or [""]]
    raise SystemExit(not all(same))


if __name__ == "__main__":
    main()
