"""Hooks of mkdocs (mkdocs.yml): links that are meant for a checkout lead somewhere on the site.

README.md is the start page. Links to files outside of docs/ lead to the repository; where its
address is unknown only their text stays. A file that is not there is an error.
"""

from __future__ import annotations

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


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page as mkdocs is to read it."""
    folder = DOCS
    if page.file.src_path == "index.md":
        markdown, folder = (ROOT / "README.md").read_text(encoding="utf-8"), ROOT

    def moved(link: re.Match[str]) -> str:
        text, target = link.groups()
        if target is None:
            return link[0]
        name, _, anchor = target.partition("#")
        place = (folder / name).resolve()
        if not name:
            return link[0]
        if not place.exists():
            raise FileNotFoundError(f"{page.file.src_path} links to {target}, which does not exist")
        if place == ROOT / "README.md":
            found = "index.md"
        elif DOCS in place.parents:
            found = str(place.relative_to(DOCS))
        elif home():
            found = f"{home()}/blob/main/{place.relative_to(ROOT)}"
        else:
            return text
        return f"[{text}]({found}{f'#{anchor}' if anchor else ''})"

    return CODE_OR_LINK.sub(moved, markdown)
