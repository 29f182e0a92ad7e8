"""Sources that the build writes: csrc/torch in one unit, and what a binding says of itself.

Reading torch's headers takes a fourth of that unit's time; a unit for each folder would take as
long each, and two together as much more as the code in the smaller one.

Sources with rules of optimizers are compiled once for each family of rules.
"""

from __future__ import annotations

from pathlib import Path

from build_tools.metadata import commit


def torch_unit(csrc: Path, folder: Path) -> Path:
    """Writes the source that includes csrc/torch to `folder`, where it changed, and returns it."""
    return one_unit(folder / "torch_binding.cpp", sorted(csrc.glob("torch/**/*.cpp")))


def families_of(source: Path) -> list[str]:
    """The families of rules that a source of csrc/cpu or csrc/cuda is compiled for.

    They are the headers of csrc/core/rules with a list. [""] for a source without
    csrc/core/family.h, which is compiled once.
    """
    if '#include "core/family.h"' not in source.read_text():
        return [""]
    headers = sorted(source.parents[1].glob("core/rules/*.h"))
    return [h.stem for h in headers if f"#define AMP_MP_RULES_OF_{h.stem}(" in h.read_text()]


def one_unit(unit: Path, sources: list[Path]) -> Path:
    """Writes a source that includes others, where they changed, and returns it."""
    return _written(unit, "".join(f'#include "{source}"\n' for source in sources))


def facts_unit(folder: Path, torch: str, toolkit: str, architectures: str) -> Path:
    """Writes build_facts.cpp, which amp.build_info() shows, and returns it.

    In a source of its own: a new commit then compiles nothing else.
    """
    facts = ", ".join(f'"{fact}"' for fact in (torch, toolkit, architectures, commit()))
    text = '#include "torch/build_facts.h"\n\nnamespace amp_mp {\n'
    text += f"const BuildFacts build_facts = {{{facts}}};\n}}  // namespace amp_mp\n"
    return _written(folder / "build_facts.cpp", text)


def _written(path: Path, text: str) -> Path:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path
