"""Hooks of mkdocs (mkdocs.yml): links that are meant for a checkout lead somewhere on the site.

README.md is the start page. Links to files outside of docs/ lead to the repository; where its
address is unknown only their text stays. A file that is not there is an error. Behind
reference/optim.md come the arguments that all optimizers take.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
sys.path.append(str(ROOT))

from build_tools.metadata import LINK, home  # noqa: E402

# A lambda of C++ in a block of code looks like a link.
CODE_OR_LINK = re.compile(rf"^```.*?^```$|{LINK.pattern}", re.DOTALL | re.MULTILINE)


def shared_arguments() -> str:
    """What help() of every optimizer ends with, as a list."""
    tree = ast.parse((ROOT / "python/amp_mp/optim/options.py").read_text(encoding="utf-8"))
    (text,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SHARED"
    )
    items = re.sub(r"^ {8}(\S[^:]*): ", r"\n- `\1`: ", text, flags=re.MULTILINE)
    return re.sub(r"^ {4}(?! )", "\n", items, flags=re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page as mkdocs is to read it."""
    source = page.file.src_path
    folder = shown = (DOCS / source).parent
    if source == "index.md":
        markdown, folder = (ROOT / "README.md").read_text(encoding="utf-8"), ROOT
    appended = f"\n{shared_arguments()}" if source == "reference/optim.md" else ""

    def moved(link: re.Match[str]) -> str:
        text, target = link.groups()
        if target is None:
            return link[0]
        name, _, anchor = target.partition("#")
        place = (folder / name).resolve()
        if not name:
            return link[0]
        if not place.exists():
            raise FileNotFoundError(f"{source} links to {target}, which does not exist")
        if place == ROOT / "README.md":
            found = os.path.relpath(DOCS / "index.md", shown)
        elif DOCS in place.parents:
            found = os.path.relpath(place, shown)
        elif home():
            found = f"{home()}/blob/main/{place.relative_to(ROOT)}"
        else:
            return text
        return f"[{text}]({found}{f'#{anchor}' if anchor else ''})"

    return CODE_OR_LINK.sub(moved, markdown) + appended
