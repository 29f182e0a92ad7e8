"""The sources of csrc/torch as two units, because each unit parses torch's headers once.

That takes some 18 s of CPU time, most of them more than the source's own code takes. Two, so that
two cores work; after a change only the unit that has the file is compiled again.
"""

from __future__ import annotations

from pathlib import Path


def torch_units(csrc: Path, folder: Path) -> list[Path]:
    """Writes the two sources to `folder`, where they changed, and returns them."""
    units = {"torch_ops": csrc.glob("torch/*.cpp"), "torch_folders": csrc.glob("torch/*/**/*.cpp")}
    return [one_unit(folder / f"{name}.cpp", sorted(sources)) for name, sources in units.items()]


def one_unit(unit: Path, sources: list[Path]) -> Path:
    """Writes a source that includes others, where they changed, and returns it."""
    text = "".join(f'#include "{source}"\n' for source in sources)
    if not unit.exists() or unit.read_text() != text:
        unit.write_text(text)
    return unit
