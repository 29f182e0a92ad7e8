"""What a release says of itself: commit, home on the web, README with links that lead there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[([^\]]*)\]\((?!https?://)([^)]*)\)")


def commit() -> str:
    """Of this source: AMP_MP_COMMIT, git's, or that in the file COMMIT of an sdist; else ""."""
    if named := os.environ.get("AMP_MP_COMMIT"):
        return named
    if (ROOT / ".git").exists():
        return _git("describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+changes")
    file = ROOT / "COMMIT"
    return file.read_text().strip() if file.exists() else ""


def home() -> str:
    """The project's address: AMP_MP_HOME, else that of git's remote origin; "" if unknown."""
    found = os.environ.get("AMP_MP_HOME") or _git("remote", "get-url", "origin")
    found = re.sub(r"^(?:ssh://)?git@([^:/]+)[:/]", r"https://\1/", found).removesuffix(".git")
    return found if found.startswith("https://") else ""


def urls(version: str) -> dict[str, str]:
    """What an index shows beside the description; empty where the project's address is unknown."""
    address = home()
    if not address:
        return {}
    at = f"{address}/blob/v{version}"
    return {
        "Homepage": address,
        "Documentation": f"{at}/docs/overview.md",
        "Changelog": f"{at}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def long_description(version: str) -> str:
    """README.md without pictures and with absolute links, since an index has none of the files."""
    at = f"{home()}/blob/v{version}"

    def absolute(link: re.Match[str]) -> str:
        text, target = link.groups()
        if not home():
            return text
        return f"[{text}]({at}/{'README.md' if target.startswith('#') else ''}{target})"

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return LINK.sub(absolute, re.sub(r"^!\[.*\n\n", "", text, flags=re.MULTILINE))


def _git(*arguments: str) -> str:
    """What git prints of this tree; "" without git, or where it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
