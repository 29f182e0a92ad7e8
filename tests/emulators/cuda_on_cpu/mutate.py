"""Kernels with one mistake put in, to see that the comparing program notices it.

A mutant is one edit of one file. Only the kernels that show it are compiled anew, from a copy of
the sources; all else is linked as it was built without the mistake.
"""

import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cuda_on_cpu.build import Part, arguments, build, link, objects_of, parts_of
from made import compiled
from mutants import Mutant


@dataclass(frozen=True, kw_only=True)
class CudaMutant(Mutant):
    """A mistake in a file of csrc/cuda, or from there, and what notices it."""

    variant: str = "plain"  # of build.VARIANTS; tsan needs all kernels: shared memory differs there
    shown_by: str  # pattern of the files to compile with it, of csrc/cuda
    says: str  # part of the output


def cuda_mutant(fields: dict[str, str]) -> CudaMutant:
    """The mutant of a table, which need not say what is usual."""
    return CudaMutant(**(_usual(fields) | fields))


def _usual(fields: dict[str, str]) -> dict[str, str]:
    """What a mutant need not say."""
    if fields.get("variant") == "tsan":
        return {"shown_by": "*.cu", "says": "ThreadSanitizer: data race"}
    file = fields["file"]
    return {"shown_by": file if file.endswith(".cu") else "apply.cu", "says": "FAILED apply"}


@dataclass(frozen=True)
class Original:
    """The program without a mistake, and what it is linked from."""

    csrc: Path  # a copy
    out: Path
    program: Path
    objects: dict[Part, Path]


def build_original(
    sources: Sequence[Path], csrc: Path, rules: Collection[str], out: Path
) -> Original:
    """Build `sources` from a copy of `csrc` that has only some `rules`, to compile in less time.

    Raises ValueError for a rule that no header of core/rules has.
    """
    copy = _copied(csrc, out / "csrc")
    headers = {header: header.read_text() for header in sorted(copy.glob("core/rules/*.h"))}
    for header, text in with_rules(headers, rules).items():
        header.write_text(text)
    sources = [copy / s.relative_to(csrc) if s.is_relative_to(csrc) else s for s in sources]
    program = build(sources, out, "plain", [copy])
    return Original(copy, out, program, objects_of(sources, "plain", [copy]))


def build_mutant(mutant: CudaMutant, original: Original, name: str) -> Path:
    """Build the program with a mistake.

    Raises ValueError where its text has gone, or no file is to be compiled with it.
    """
    folder = original.out / re.sub(r"\W+", "-", name)
    csrc = _copied(original.csrc, folder / "csrc")
    file = csrc / "cuda" / mutant.file
    file.write_text(mutant.of(file.read_text()))
    shown_by = sorted((csrc / "cuda").glob(mutant.shown_by))
    if not shown_by or (mutant.variant == "tsan" and mutant.shown_by != "*.cu"):
        raise ValueError(f"shown_by: {mutant.shown_by!r} has to name kernels, with tsan '*.cu'")
    objects = dict(original.objects)
    for part in (part for source in shown_by for part in parts_of(source)):
        source, family = part
        made = compiled(source, [*arguments(part, mutant.variant, [csrc]), "-w"])
        objects[original.csrc / source.relative_to(csrc), family] = made
    return link(list(objects.values()), folder / "program", mutant.variant)


def _copied(csrc: Path, copy: Path) -> Path:
    """A copy of the sources, in place of one that may be there."""
    shutil.rmtree(copy, ignore_errors=True)
    return Path(shutil.copytree(csrc, copy))


def with_rules(headers: Mapping[Path, str], rules: Collection[str]) -> dict[Path, str]:
    """The headers of core/rules with only some lines of their lists.

    A family of none of them has an empty list. Raises ValueError where a rule is in no header.
    """
    line = re.compile(r"^  X\((\w+), \w+\).*\n", re.MULTILINE)
    listed = [name for text in headers.values() for name in line.findall(text)]
    if missing := set(rules) - set(listed):
        raise ValueError(f"rules: {sorted(missing)} are in no header, which have {listed}")
    # The last line of a list has no backslash: an empty one ends it in place of a line left out.
    kept = {h: line.sub(lambda m: m[0] if m[1] in rules else "", t) for h, t in headers.items()}
    return {h: text if text == headers[h] else f"{text}\n" for h, text in kept.items()}
