"""How the package is laid out: imports without circles, small files, names that stay in their file.

A room is a folder of python/amp_mp. docs/design.md says what each of them holds.
"""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch
from definitions import defined_in, tree_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python/amp_mp"
NATIVE = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cpp", ".cu"))

SHARED = {
    "amp_mp.callers",
    "amp_mp.dtypes",
    "amp_mp.messages",
    "amp_mp.nested",
    "amp_mp.param_groups",
    "amp_mp.switch",
    "amp_mp._C",
    "amp_mp.text_table",
    "amp_mp.torch_private",
    "amp_mp.torch_versions",
    "amp_mp.sharding.shards",
}  # what every room may import

# What native code reads by name: attributes of Python's objects, and of torch's.
READ_BY_NAME = {"__dict__", "__all__", "get", "split", "wait", "dtype", "layout", "_local_tensor"}
READ_BY_NAME |= {"get_swap_module_params_on_conversion"}

# A file of csrc or of the package that a comment or docstring names by its folder.
NAMED_FILE = re.compile(
    r"(?<![\w./-])(?:csrc/)?((?:core|cpu|cuda|torch(?!/csrc|/library))/[\w/]+\.(?:h|cpp|cu))\b"
)


def module_name(path: Path) -> str:
    """amp_mp.optim.base for python/amp_mp/optim/base.py, amp_mp.optim for its __init__.py."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported(name: str) -> set[str]:
    """Modules of amp_mp that a module imports, also in functions and under TYPE_CHECKING."""
    folder = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(tree_of(MODULES[name])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = folder.split(".")[: len(folder.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in MODULES or full in SHARED else base)
    return {module for module in found if module.split(".")[0] == "amp_mp"} - {name}


def room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def test_imports_make_no_circle() -> None:
    graph = {name: imported(name) for name in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("these modules import one another: " + " <- ".join(error.args[1]))


@pytest.mark.parametrize("below", ["amp_mp.scaling", "amp_mp.casting", "amp_mp.sharding"])
def test_the_lowest_rooms_import_no_other_room(below: str) -> None:
    wrong = {
        name: others
        for name in MODULES
        if room(name) == below
        and (others := {m for m in imported(name) - SHARED if room(m) != below})
    }
    assert not wrong


# torch's own private names may be used where it has no public one for the same.
TORCHS = (torch, torch.Tensor, torch.nn.Module(), torch.optim.Optimizer)


def belongs_to_self(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        value = value.func
    return isinstance(value, ast.Name) and value.id in ("self", "cls", "super")


def test_private_names_are_used_in_their_own_file_alone() -> None:
    trees = {name: tree_of(path) for name, path in MODULES.items()}
    defined = {name: defined_in(tree) for name, tree in trees.items()}
    ours = set().union(*defined.values())
    wrong = [
        f"{MODULES[name].relative_to(ROOT)}:{node.lineno}: {node.attr}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.match("_[a-z]", node.attr)
        and node.attr in ours - defined[name]
        and not any(hasattr(torchs, node.attr) for torchs in TORCHS)
        and not belongs_to_self(node.value)
    ]
    assert not wrong, "\n".join(wrong)


def test_files_that_are_named_are_there() -> None:
    """In the package, the stubs, csrc and the guide to them."""
    texts = [*PACKAGE.rglob("*.py*"), *NATIVE, ROOT / "docs/design.md"]
    named = {
        (path, name)
        for path in texts
        if path.suffix != ".pyc"
        for name in NAMED_FILE.findall(path.read_text())
        if "AMP_MP_" not in name  # core/family.h names its header by a macro
    }
    assert len(named) > 100
    assert [each for each in sorted(named) if not (ROOT / "csrc" / each[1]).is_file()] == []


def test_native_code_reads_no_name_of_the_package() -> None:
    """Neither mypy nor a search would find it: it is passed down, or typed in functions.h."""
    found = {name for p in NATIVE for name in re.findall(r'attr\("(\w+)"', p.read_text())}
    assert found == READ_BY_NAME


def test_notes_of_the_guide_and_of_the_sources_are_the_same() -> None:
    """Sources cite an invariant of docs/design.md by its name; one that no source cites is none."""
    folders = ("csrc", "python", "build_tools")
    texts = [
        path.read_text()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".h", ".cpp", ".cu", ".py")
    ]
    cited = {
        name for text in texts for name in re.findall(r"\bNote: (.+?) \(docs/design\.md", text)
    }
    named = re.findall(r"\*\*Note: (.+?)\.\*\*", (ROOT / "docs/design.md").read_text())
    assert cited == set(named)
    assert len(named) == len(cited) > 5
