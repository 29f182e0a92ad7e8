"""Objects of the emulators stay between runs: they are compiled again where something differs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import made
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("g++"), reason="no g++"),
]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source with a header, and a folder of their own for what is made of them."""
    monkeypatch.setattr(made, "KEPT", tmp_path / "kept")
    (tmp_path / "value.h").write_text("#define VALUE 1\n")
    source = tmp_path / "value.cpp"
    source.write_text('#include "value.h"\nint value() { return VALUE; }\n')
    return source


def test_the_same_command_shares_an_object_until_a_byte_differs(source: Path) -> None:
    def time_made(*flags: str) -> int:
        return made.compiled(source, ["g++", *flags]).stat().st_mtime_ns

    first = time_made()
    source.touch()  # a checkout gives the same bytes new times
    assert time_made() == first
    assert time_made("-O1") != first
    source.with_name("value.h").write_text("#define VALUE 2\n")
    assert time_made() > first


def test_a_program_is_linked_again_when_an_object_is_another(source: Path, tmp_path: Path) -> None:
    main = tmp_path / "main.cpp"
    main.write_text("int value();\nint main() { return value(); }\n")
    runs = []
    for value in (3, 3, 5):
        source.with_name("value.h").write_text(f"#define VALUE {value}\n")
        objects = [made.compiled(s, ["g++"]) for s in (source, main)]
        program = made.linked(["g++", *map(str, objects)], tmp_path / "program")
        runs.append((subprocess.run([program]).returncode, program.stat().st_mtime_ns))
    assert [code for code, _ in runs] == [3, 3, 5]
    assert runs[0] == runs[1]


def test_what_the_compiler_says_is_raised_and_nothing_is_kept(source: Path) -> None:
    source.write_text("int value() { return undeclared; }\n")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="undeclared"):
            made.compiled(source, ["g++"])
