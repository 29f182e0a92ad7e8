"""docs/errors.md quotes messages that the code has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from definitions import tree_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text()


def texts() -> Iterator[str]:
    """Every text in the code; literals that stand next to each other are one."""
    for path in [*(ROOT / "python").rglob("*.py"), ROOT / "build_tools/found.py"]:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    for path in [*(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc").rglob("*.cpp")]:
        joined = re.sub(r'"\s*\n\s*"', "", path.read_text())
        for text in re.findall(r'"((?:[^"\\]|\\.)*)"', joined):
            yield text.replace('\\"', '"')


def test_the_code_has_each_part_of_a_quoted_message() -> None:
    """The parts between "...", for what varies and for where a text is put together."""
    blocks = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for line in "".join(blocks).splitlines() if line.strip()]
    known = "\n".join(texts())
    parts = [part.strip() for line in lines for part in line.split("...")]
    assert len(lines) > 60
    assert [part for part in parts if part not in known] == []
