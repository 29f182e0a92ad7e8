"""docs/adding_things.md, applied to a copy of the tree: it builds, and what was added works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from built_copies import ROOT, build, copy_tree, run

sys.path.append(str(ROOT))

from build_tools.generated import families_of

GUIDE = (ROOT / "docs/adding_things.md").read_text()
# A place and a block of code: the line above the block says where it goes.
EDIT = re.compile(
    r"^(?:New file|In) `([^`]+)`(?:, (after|before|instead of) `([^`]+)`)?:\n\n```\w+\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
BUILT = [pytest.mark.full, pytest.mark.slow, pytest.mark.xdist_group("adding_things")]
# Each example's tests, and how many there are at least.
TESTS = {
    "optimizer": (["tests/optim/step/test_rules.py", "-k", "signum"], 20),
    "optimizer in the backward pass": (["tests/optim/backward/test_attach.py", "-k", "Signum"], 1),
    "format": (["tests/formats/test_ue8m0.py"], 3),
    "policy": (["tests/scaling/test_additive.py"], 2),
    "operator": (["tests/casting/test_casting_lists.py"], 15),
    "CUDA kernels": (
        ["tests/emulators/test_cuda_kernels.py", "-k", "equal_the_cpu_loops and plain-7"],
        1,
    ),
}


def applied(text: str, place: str, anchor: str, block: str) -> str:
    """A file's text with a block put after, before or instead of the one line with the anchor."""
    lines = text.splitlines(keepends=True)
    (at,) = [i for i, line in enumerate(lines) if anchor in line]
    lines[at] = {"after": lines[at] + block, "before": block + lines[at]}.get(place, block)
    return "".join(lines)


def texts_of_the_guide() -> dict[str, str]:
    """Each file that the guide adds or changes."""
    texts: dict[str, str] = {}
    for file, place, anchor, block in EDIT.findall(GUIDE):
        path = ROOT / file
        assert (file in texts or path.exists()) == bool(place), f"{file} is there, or is missing"
        text = texts.get(file) or (path.read_text() if place else "")
        texts[file] = applied(text, place, anchor, block) if place else block
    return texts


def test_every_block_of_the_guide_has_its_place() -> None:
    assert len(EDIT.findall(GUIDE)) == GUIDE.count("\n```") / 2 > 20
    assert len(texts_of_the_guide()) > 15


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the tree as the guide changes it, built without CUDA."""
    copy = tmp_path_factory.mktemp("adding_things") / "tree"
    copy_tree(copy, "*.so")
    for file, text in texts_of_the_guide().items():
        (copy / file).write_text(text)
    build(copy, AMP_MP_WERROR="1", MAX_JOBS="2")
    yield copy
    shutil.rmtree(copy)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("example", [pytest.param(name, marks=BUILT) for name in TESTS])
def test_what_was_added_passes_its_tests(tree: Path, example: str) -> None:
    tests, least = TESTS[example]
    done = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) >= least
    assert "skipped" not in done.stdout


@pytest.mark.timeout(900)
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.xdist_group("adding_things")
def test_the_kernels_with_the_new_format_compile(tree: Path, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc", path=f"{os.environ.get('PATH')}:/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("no nvcc")
    command = [nvcc, "-std=c++20", "-O0", "-Xcicc", "-O0", "-arch=compute_90", f"-I{tree}/csrc"]
    ptx = tmp_path / "apply.ptx"
    with_signum = []
    for family in families_of(tree / "csrc/cuda/apply.cu"):
        options = ["-ptx", f"-DAMP_MP_FAMILY={family}", "-o", str(ptx)]
        done = subprocess.run(
            [*command, *options, f"{tree}/csrc/cuda/apply.cu"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        with_signum += [family] if "Signum" in ptx.read_text() else []
    assert with_signum == ["adaptive"]
