"""docs/errors.md has an entry for every error and warning, and quotes none that is not there."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from build_tools import messages  # noqa: E402

LINES = messages.messages((ROOT / "docs" / "errors.md").read_text())


@cache
def texts() -> list[tuple[str, int, str]]:
    return list(messages.texts())


def test_every_message_has_an_entry() -> None:
    missing = [
        f"{file}:{line}: {text}"
        for file, line, text in texts()
        if not messages.has_entry(text, LINES)
    ]
    assert not missing, "docs/errors.md lacks these messages:\n" + "\n".join(missing)


def test_every_quoted_message_is_in_the_code() -> None:
    known = [text for _, _, text in texts()]
    stale = [line for line in LINES if not messages.is_in_code(line, known)]
    assert not stale, "no code has these messages of docs/errors.md:\n" + "\n".join(stale)


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


@pytest.mark.parametrize(
    ("text", "line", "found"),
    [
        ("betas must be two numbers, found ...", "betas must be two numbers, found 3", True),
        ("betas must be two numbers, found ...", "rho must be two numbers, found ...", False),
        ("... must be ...", "... must be ...", True),
        ("... must be ...", "x must be 3", False),
        ("first line is long enough:\n    pip", "first line is long enough:", True),
    ],
)
def test_when_a_text_has_an_entry(text: str, line: str, found: bool) -> None:
    assert messages.has_entry(text, [line]) == found


def test_a_quoted_line_needs_its_parts_in_order() -> None:
    known = ["the master (...) does not go with the weight (...)"]
    assert messages.is_in_code("the master ... does not go with ...", known)
    assert not messages.is_in_code("the weight ... does not go with ...", known)


def test_which_lines_of_a_page_are_messages() -> None:
    page = "```text\nfirst\n  second\n```\n```python\nno\n```\n| `third` | `no` |\n- `no`\n"
    assert messages.messages(page) == ["first", "second", "third"]
