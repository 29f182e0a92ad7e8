"""The stubs of the native library name what it has: functions, classes, arguments and defaults.

Types are the stubs' own: pybind11's signatures name no type for elements of lists and dicts, and do
not say which tensors and pointers may be None.
"""

from __future__ import annotations

import ast
import inspect
import types
from pathlib import Path
from typing import Any

import amp_mp
from amp_mp import _C

PACKAGE = Path(amp_mp.__file__).parent
STUB = ast.parse((PACKAGE / "_C.pyi").read_text())
AMP_C = ast.parse((PACKAGE / "apex/amp_C.pyi").read_text())
STUBS = {"_C": (_C, STUB.body), "_C.amp_C": (_C.amp_C, AMP_C.body)}
for each in STUB.body:  # classes in the stub are classes or submodules of the library
    if isinstance(each, ast.ClassDef) and hasattr(_C, each.name):
        STUBS[f"_C.{each.name}"] = getattr(_C, each.name), each.body


def native_names(owner: Any) -> set[str]:
    """Functions, classes and properties; of a class also its constructor and its call."""
    names = {name for name in vars(owner) if name[0] != "_"}
    for name in ("__init__", "__call__") if isinstance(owner, type) else ():
        # Classes without a constructor have one of pybind11's, which raises.
        if (vars(owner).get(name, name).__doc__ or "").startswith(f"{name}(self: "):
            names.add(name)
    return names


def stub_names(body: list[ast.stmt]) -> set[str]:
    names = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.ImportFrom) and node.module == "amp_mp.apex":
            names |= {alias.name for alias in node.names}
    return names


def test_the_stub_has_the_librarys_names() -> None:
    typed = {"FormatEntry"}  # a TypedDict of the stub alone
    wrong = {
        name: (stub, native)
        for name, (owner, body) in STUBS.items()
        if (stub := stub_names(body) - typed) != (native := native_names(owner))
    }
    assert len(STUBS) > 20
    assert wrong == {}


def arguments(function: ast.FunctionDef) -> list[tuple[str, str, object]]:
    """Each with its kind and its default, None without one; "..." for one that the stub omits."""
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    missing = len(plain) - len(given.defaults)
    defaults = [None] * missing + [ast.unparse(default) for default in given.defaults]
    found = [(each.arg, "", default) for each, default in zip(plain, defaults, strict=True)]
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append((each.arg, "*", None if default is None else ast.unparse(default)))
    return found


def native_signature(function: Any) -> ast.FunctionDef:
    """Of the first line of pybind11's docstring."""
    line = (inspect.getdoc(function) or "").partition("\n")[0]
    node = ast.parse(f"def {line}: ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    return node


FUNCTIONS = {
    f"{place}.{node.name}": (getattr(owner, node.name), node)
    for place, (owner, body) in STUBS.items()
    for node in body
    if isinstance(node, ast.FunctionDef) and not isinstance(getattr(owner, node.name), property)
}


def test_the_stub_has_the_native_arguments() -> None:
    wrong = {}
    for name, (function, node) in FUNCTIONS.items():
        stub, native = arguments(node), arguments(native_signature(function))
        omitted = {each for each, _, default in stub if default == "..."}
        right = stub == [(n, k, "..." if n in omitted and d else d) for n, k, d in native]
        if not right:
            wrong[name] = stub, native
    assert len(FUNCTIONS) > 100
    assert wrong == {}


def test_the_stub_says_which_properties_can_be_written() -> None:
    for owner, body in STUBS.values():
        for node in body:
            is_variable = isinstance(node, ast.AnnAssign)
            written = is_variable and "Final" not in ast.unparse(node.annotation)
            name = node.target.id if is_variable else getattr(node, "name", "")
            native = vars(owner).get(name) if isinstance(owner, type) else None
            if isinstance(native, property):
                assert (native.fset is not None) == written, f"{owner.__name__}.{name}"


def test_submodules_are_classes_of_the_stub() -> None:
    modules = {name for name, value in vars(_C).items() if isinstance(value, types.ModuleType)}
    assert modules == {"amp_C", "casting", "products"}
