"""errors.md quotes messages of the code, and the site's page lists all that the code has."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from definitions import tree_of

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from build_tools import messages, site  # noqa: E402

PAGE = (ROOT / "docs" / "errors.md").read_text()


def test_every_quoted_message_is_in_the_code() -> None:
    known = [text for _, _, text in messages.texts()]
    quoted = messages.messages(PAGE)
    assert len(quoted) > 60
    stale = [line for line in quoted if not messages.is_in_code(line, known)]
    assert not stale, "no code has these messages of docs/errors.md:\n" + "\n".join(stale)


def raised() -> Iterator[str]:
    """Literals of what is raised, warned of or thrown, found in a cruder way than messages.py's."""
    for path in (ROOT / "python").rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            match node:
                case ast.Raise() | ast.Call(func=ast.Attribute(attr="warn") | ast.Name(id="warn")):
                    texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
                    yield from (text for text in texts if isinstance(text, str))
    for path in (ROOT / "csrc").rglob("*.*"):
        thrown = r"(?:TORCH_(?:CHECK|WARN)|throw )[\w:]*\(.*?;\n"
        for statement in re.findall(thrown, path.read_text(), re.DOTALL):
            for text in re.findall(r'"((?:[^"\\]|\\.)*)"', statement):
                yield text.replace('\\"', '"')


def test_the_site_lists_every_message() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_path="errors.md"))
    shown = site.on_page_markdown(PAGE, page)
    assert shown.startswith("# Errors and questions")
    missing = {text for text in raised() if len(text.split()) > 2 and text.strip() not in shown}
    assert not missing


PYTHON = """
REASONS = {"a": "reason one", **{key: "reason two" for key in "bc"}}
def why(): return f"the value {x} is refused"
def f(name):
    wrong = ""
    if name: wrong = "has no name" if name == "x" else "has a strange name"
    raise ValueError(f"{name!r} {wrong}; " + "found " f"{1 + 1}")
    raise TypeError(f"no {name}: {REASONS[name]}")
    raise KeyError(why())
    assert name, "a name is needed"
    warn("told once")
    warnings.warn("told by %s" % name)
    logger.warning("from %g to %g", 1, 2)
    raise error
def advice(): return "keep it in float32"
"""
FOUND_IN_PYTHON = {
    "... has no name; found ...",
    "... has a strange name; found ...",
    "no ...: reason one",
    "no ...: reason two",
    "the value ... is refused",
    "a name is needed",
    "told once",
    "told by ...",
    "from ... to ...",
    "keep it in float32",
}
CPP = r"""
TORCH_CHECK(f(a, ","), "amp_mp: ", name, " is ", x > 0 ? "large" : "small", "; say \"no\"");
// TORCH_CHECK(false, "a comment")
TORCH_CHECK_VALUE(false, "two "  // a comment "between"
                  "literals");
throw py::type_error(std::string("holds a ") + text_of(x, "name") + "; a tensor is needed");
refuse(name + ": 'params' is missing");
if (t.is_meta()) return "is on the meta device";
return wrong(name, "is not a tensor: " + repr_of(value));
return "op_name";
"""
FOUND_IN_CPP = {
    'amp_mp: ... is large; say "no"',
    'amp_mp: ... is small; say "no"',
    "two literals",
    "holds a ...; a tensor is needed",
    "...: 'params' is missing",
    "is on the meta device",
    "is not a tensor: ...",
}


def test_texts_of_python_are_found() -> None:
    assert {text for _, text in messages.of_python(PYTHON)} == FOUND_IN_PYTHON


def test_texts_of_cpp_are_found() -> None:
    assert {text for _, text in messages.of_cpp(CPP)} == FOUND_IN_CPP


def test_a_quoted_line_needs_its_parts_in_order() -> None:
    known = ["the master (...) does not go with the weight (...)"]
    assert messages.is_in_code("the master ... does not go with ...", known)
    assert not messages.is_in_code("the weight ... does not go with ...", known)


def test_which_lines_of_a_page_are_messages() -> None:
    page = "```text\nfirst\n  second\n```\n```python\nno\n```\n- `no`\n"
    assert messages.messages(page) == ["first", "second"]
