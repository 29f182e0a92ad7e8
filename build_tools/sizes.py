"""Prints the lines of each folder, and the longest files: where a reader has most to read.

python build_tools/sizes.py
"""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = (".py", ".pyi", ".h", ".cpp", ".cu")
FOLDERS = ("python/amp_mp", "csrc", "csrc/torch", "tests", "benchmarks", "examples", "build_tools")


def sizes() -> dict[Path, int]:
    """Lines of each file that git knows."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    paths = [Path(line) for line in listed.stdout.splitlines()]
    code = [path for path in paths if path.suffix in CODE and (ROOT / path).exists()]
    return {path: len((ROOT / path).read_text().splitlines()) for path in code}


def main() -> None:
    """What the text above says."""
    lines = sizes()
    for folder in FOLDERS:
        found: Counter[str] = Counter()
        for path, count in lines.items():
            if path.is_relative_to(folder):
                parts = path.relative_to(folder).parts
                found[parts[0] if len(parts) > 1 else "."] += count
        print(f"{folder}: {found.total()}")
        print("   ", ", ".join(f"{name} {count}" for name, count in sorted(found.items())))
    print("longest:")
    for path, count in sorted(lines.items(), key=lambda row: -row[1])[:12]:
        print(f"    {count:5} {path}")


if __name__ == "__main__":
    main()
