"""Tests notice mistakes in the CPU loops, in the binding and in Python: mutants have to fail.

Another table in a .toml file beside this one is all that another mutant takes: the file, a text
that occurs there once, what to put in its place, and the tests that are to fail.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from built_copies import ROOT, build, copy_tree, run
from mutants import Mutant, read_mutants


@dataclass(frozen=True, kw_only=True)
class NoticedMutant(Mutant):
    """A mistake in a file of csrc or python, and the tests that notice it."""

    killed_by: tuple[str, ...]  # names as pytest takes them, as few as there are


MUTANTS = read_mutants(
    Path(__file__).parent,
    lambda fields: NoticedMutant(**(fields | {"killed_by": tuple(fields["killed_by"])})),
)
OF_PYTHON = [name for name, mutant in MUTANTS.items() if mutant.file.startswith("python/")]
NATIVE = [name for name in MUTANTS if name not in OF_PYTHON]
OPTIONS = ("-n", "0", "-xq", "-p", "no:cacheprovider", "-m", "not full")
KEPT = ROOT / "build/mutants"
FULL = [
    *(pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(3600)),
    pytest.mark.xdist_group("mutants"),
]


def test_every_mutant_fits_its_source() -> None:
    for mutant in MUTANTS.values():
        mutant.of((ROOT / mutant.file).read_text())
        for test in mutant.killed_by:
            assert (ROOT / test.partition("::")[0]).exists(), test


class Copy:
    """A copy of the tree in which mistakes are made and undone."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.objects = folder, folder / "build/objects"
        self.without_a_mistake = folder / "build/without_a_mistake"

    @contextmanager
    def mistaken(self, mutant: Mutant) -> Iterator[None]:
        """The file has the mistake for the time of a block, and the time of its change."""
        file = self.folder / mutant.file
        file.write_text(mutant.of(file.read_text()))
        try:
            yield
        finally:
            shutil.copy2(ROOT / mutant.file, file)

    def build(self) -> None:
        """Compiles the objects that are older than their sources, and links."""
        build(self.folder, AMP_MP_OBJECTS=str(self.objects), MAX_JOBS="2")

    def keep(self) -> None:
        """Keeps the objects, with their times."""
        shutil.rmtree(self.without_a_mistake, ignore_errors=True)
        shutil.copytree(self.objects, self.without_a_mistake)

    def undo(self) -> None:
        """Takes the kept objects: only what depends on the next mistake is compiled for it."""
        shutil.rmtree(self.objects)
        shutil.copytree(self.without_a_mistake, self.objects)

    def failures(self, tests: tuple[str, ...]) -> tuple[int, str]:
        """pytest's exit status of some tests of `make test`, and the end of what it printed."""
        done = run(self.folder, "-m", "pytest", *OPTIONS, *tests)
        return done.returncode, (done.stdout + done.stderr)[-4000:]


def all_tests(names: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(test for name in names for test in MUTANTS[name].killed_by))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    """A copy with this tree's native library."""
    copy = Copy(tmp_path_factory.mktemp("mutants") / "tree")
    copy_tree(copy.folder)
    yield copy
    shutil.rmtree(copy.folder)


@pytest.fixture(scope="module")
def native() -> Copy:
    """A copy with a native library of its own; its objects stay for the next time."""
    copy = Copy(KEPT / "tree")
    copy_tree(copy.folder, "*.so")
    copy.build()
    copy.keep()
    return copy


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=FULL) for kind in ("python", "native")])
def test_without_a_mistake_all_pass(kind: str, request: pytest.FixtureRequest) -> None:
    copy = request.getfixturevalue(kind)
    status, output = copy.failures(all_tests(OF_PYTHON if kind == "python" else NATIVE))
    assert status == 0, output


@pytest.mark.parametrize("name", [pytest.param(name, marks=FULL) for name in OF_PYTHON])
def test_mistake_in_python_is_noticed(python: Copy, name: str) -> None:
    with python.mistaken(MUTANTS[name]):
        status, output = python.failures(MUTANTS[name].killed_by)
    assert status == 1, f"nobody noticed: {name}\n{output}"


@pytest.mark.parametrize("name", [pytest.param(name, marks=FULL) for name in NATIVE])
def test_mistake_in_native_code_is_noticed(native: Copy, name: str) -> None:
    with native.mistaken(MUTANTS[name]):
        try:
            native.build()
            status, output = native.failures(MUTANTS[name].killed_by)
        finally:
            native.undo()
    assert status == 1, f"nobody noticed: {name}\n{output}"
