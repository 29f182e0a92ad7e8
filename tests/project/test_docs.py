"""The documentation's code runs, its links lead somewhere, and the tests that it names exist."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pages
import pytest
from forked import Script, run_each
from pages import blocks, packages_of, ranks_of, run_page
from ranks import on_ranks

import amp_mp as amp

pytestmark = pytest.mark.xdist_group("distributed")

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "examples" / "apex" / "README.md",
        ROOT / "tests" / "features.md",
        ROOT / "benchmarks" / "gpu" / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
    )
}
FEATURES = PAGES["tests/features.md"].read_text()
ROWS = re.findall(r"^\| ((?:OS|NV|RP|AX)-\w+) \|.*\| (.*) \|$", FEATURES, re.MULTILINE)


README = blocks(PAGES["README.md"].read_text())
RECIPES = ["prepare", "GradScaler", "init", "FP16_Optimizer"]
# Those of the two others are parts of files (adding_things.md: test_adding_things.py).
RUN = {
    name: page
    for name, page in PAGES.items()
    if blocks(page.read_text()) and name not in ("CONTRIBUTING.md", "docs/adding_things.md")
}


def test_the_site_shows_every_page_and_every_public_name() -> None:
    shown = re.findall(r"([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    docs = ROOT / "docs"
    assert sorted(shown) == sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md"))
    packages = {name for name in amp.__all__ if type(getattr(amp, name)) is type(amp)}
    assert packages == {path.stem for path in (docs / "reference").iterdir()}
    core = re.findall(r"^ +- (\w+)$", PAGES["docs/reference.md"].read_text(), re.MULTILINE)
    assert sorted(core) == sorted({*amp.__all__} - packages - {"__version__"})


def test_the_eight_names_of_the_readme_come_first() -> None:
    """In help(amp_mp) and on the site, which has the two packages among them beside its page."""
    told = re.findall(r"^    (\w+)  +\w", amp.__doc__ or "", re.MULTILINE)
    readme = prose("README.md") + "".join(README)
    assert len(told) == 8
    assert [name for name in told if f"amp.{name}" not in readme] == []
    names = [name for name in told if name not in ("optim", "checkpoint")]
    page = PAGES["docs/reference.md"].read_text()
    assert re.findall(r"^ +- (\w+)$", page, re.MULTILINE)[:6] == names


def test_the_answers_to_18_tasks_are_within_two_links_of_the_start() -> None:
    tasks = tomllib.loads((ROOT / "tests/project/answers.toml").read_text())["answers"]
    assert len(tasks) == 18
    link = re.compile(r"\]\(((?:\.\./)?[\w/]+\.md)")
    one = {page.removeprefix("../") for page in link.findall(prose("README.md"))}
    near = {"README.md", *one}
    for page in one & {*PAGES}:
        near |= {os.path.normpath(Path(page).parent / name) for name in link.findall(prose(page))}
    for task, page, words in tasks:
        assert page in near, task
        assert words in PAGES[page].read_text(), task


def test_every_row_of_the_features_is_listed_once() -> None:
    counts = {"OS": 16, "NV": 15, "RP": 26, "AX": 25}
    wanted = {f"{name}-{i}" for name, count in counts.items() for i in range(1, count + 1)}
    found = [row for row, _ in ROWS]
    assert len(found) == len(set(found))
    assert set(found) == wanted | {"OS-3a", "OS-6a", "NV-10a", "RP-24a"}


def test_the_tests_that_a_feature_names_exist() -> None:
    for row, tests in ROWS:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
        assert named, row
        for file, test in named:
            assert f"\ndef {test}(" in (ROOT / file).read_text(), f"{row}: {file}::{test}"


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def prose(page: str) -> str:
    """A page without blocks of code, and the lines that say which file they are to make."""
    text = re.sub(r"^```.*?^```", "", PAGES[page].read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^New file .*$", "", text, flags=re.MULTILINE)


# mkdocs checks those of docs/: `make docs`.
@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("docs/")])
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", prose(page)):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = PAGES[page].parent / file if file else PAGES[page]
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text()), target


def test_the_tree_of_the_repository_has_what_is_there() -> None:
    (tree,) = re.findall(r"^```text\n(.*?)^```$", PAGES["CONTRIBUTING.md"].read_text(), re.M | re.S)
    named = [line.split()[0] for line in tree.splitlines()]
    assert all((ROOT / name).is_dir() for name in named), named


def test_source_files_that_a_page_names_exist() -> None:
    """In backticks, from the repository's root; other files are named without their folders."""
    folders = "csrc|python|tests|examples|benchmarks|docs"
    pattern = rf"`((?:{folders})/[\w/.-]*\w)`"
    named = {(page, name) for page in PAGES for name in re.findall(pattern, prose(page))}
    made = "benchmarks/results"  # by `make gpu`
    needed = {each for each in named if not each[1].startswith(made)}
    missing = {(page, name) for page, name in needed if not (ROOT / name).exists()}
    assert missing == set()


@pytest.mark.parametrize(("recipe", "code"), [*zip(RECIPES, README[1:5], strict=True)], ids=RECIPES)
def test_the_recipes_of_the_readme_run(recipe: str, code: str) -> None:
    assert recipe in code
    names: dict[str, Any] = {}
    exec(README[0][: README[0].index("amp.prepare(")], names)
    before = [p.detach().float().clone() for p in names["model"].parameters()]
    try:
        exec(code, names)
    finally:
        if "handle" in names:
            names["handle"]._deactivate()
            amp.casting.uninstall()
    assert 0 < names["loss"].item() < 10
    changed = [(a != b).any() for a, b in zip(before, names["model"].parameters(), strict=True)]
    assert all(changed)


def test_what_pages_need_is_what_the_zoo_installs() -> None:
    """Its tests run the blocks that are left out below."""
    files = (ROOT / "tests/zoo").glob("requirements*.txt")
    pinned = re.findall(r"^([\w-]+)==", "\n".join(file.read_text() for file in files), re.M)
    needed = {name for page in RUN.values() for name in packages_of(page.read_text())}
    other = {"hydra": "hydra-core", "swift": "ms_swift"}  # packages that modules are not named by
    assert needed >= set(other)
    assert {other.get(name, name) for name in needed} <= set(pinned)


def test_blocks_whose_packages_are_missing_are_left_out(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    write = "```python\nopen({!r}, 'x').close()\n```\n"
    comments = ("needs: torch", "needs: torch, no_such_package", "start over")
    parts = [write.format("0"), *(f"<!-- {c} -->\n{write.format(c[-4:])}" for c in comments)]
    page.write_text("\n".join(parts))
    before = Path.cwd()
    try:
        run_page(page, tmp_path)
    finally:
        os.chdir(before)
    assert {p.name for p in (tmp_path / "page").iterdir()} == {"0", "orch", "over"}
    assert packages_of(page.read_text()) == ["torch", "torch", "no_such_package"]


def test_every_block_runs_in_order_as_printed(tmp_path: Path) -> None:
    alone = [page for page in RUN.values() if ranks_of(page.read_text()) == 1]
    scripts = [Script([pages.__file__, str(page), str(tmp_path)]) for page in alone]
    done = run_each(scripts)
    failed = {page.name: r.stderr for page, r in zip(alone, done, strict=True) if r.returncode}
    assert not failed, "\n".join(failed.values())


@pytest.mark.parametrize("name", [n for n, p in RUN.items() if ranks_of(p.read_text()) > 1])
def test_every_block_for_several_processes_runs(name: str, tmp_path: Path) -> None:
    on_ranks(ranks_of(RUN[name].read_text()), run_page, RUN[name], tmp_path)
