"""Runs the Python blocks of a page of the documentation: all of them, in order, as printed.

Comments of the page, which a reader of its source sees, say what else there is to know:

    <!-- hidden              code that runs at this place without being shown
    -->
    <!-- start over -->      the next block begins another program
    <!-- ranks: 2 -->        the page runs on two processes of one group
    <!-- needs: timm, trl -->    where a package is missing, nothing runs from here to the next
                                 `start over`; in `make test-zoo` none is
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

PART = re.compile(
    r"^(?:```python\n(?P<shown>.*?)^```$"
    r"|<!-- hidden\n(?P<hidden>.*?)^-->$"
    r"|<!-- needs: (?P<needs>[\w, ]+) -->$"
    r"|(?P<over><!-- start over -->)$)",
    re.DOTALL | re.MULTILINE,
)


def blocks(text: str) -> list[str]:
    """The Python blocks that a page shows."""
    return [part["shown"] for part in PART.finditer(text) if part["shown"] is not None]


def ranks_of(text: str) -> int:
    """On how many processes a page runs."""
    found = re.search(r"^<!-- ranks: (\d) -->$", text, re.MULTILINE)
    return int(found[1]) if found else 1


def packages_of(text: str) -> list[str]:
    """What a page needs that amp_mp does not."""
    found = [part["needs"].split(", ") for part in PART.finditer(text) if part["needs"]]
    return [name for names in found for name in names]


def run_page(page: Path, folder: Path, everything: bool = False) -> None:
    """Runs a page in a new folder for the files it writes; tracebacks have its lines.

    everything: also where a package is missing, which is then an error of the block.
    """
    folder = folder / page.stem
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    text = page.read_text()
    names: dict[str, Any] = {"__name__": "__main__"}
    skipping = False
    for part in PART.finditer(text):
        if part["over"]:
            names, skipping = {"__name__": "__main__"}, False
            continue
        if part["needs"]:
            missing = [n for n in part["needs"].split(", ") if not importlib.util.find_spec(n)]
            skipping = skipping or (bool(missing) and not everything)
            continue
        if skipping:
            continue
        kind = "shown" if part["shown"] is not None else "hidden"
        above = text.count("\n", 0, part.start(kind))
        exec(compile("\n" * above + part[kind], str(page), "exec"), names)


if __name__ == "__main__":
    import sys

    run_page(Path(sys.argv[1]), Path(sys.argv[2]))
