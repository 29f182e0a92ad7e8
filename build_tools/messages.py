"""The texts of errors and warnings in the code: `python build_tools/messages.py` prints them.

Each with its place, and with "..." for what varies in it. The site (site.py) lists them at the end
of docs/errors.md.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Names = dict[str, list[ast.AST]]
# Functions that are given a text for the user, and functions that return one.
SPEAKING = {"warn", "warning", "print", "say", "error", "add_note", "run"}
RETURNING = {"advice", "verdict", "why_unusable", "why_foreign", "describe_nonfinite"}
# What begins a text in C++. Of what is returned or assigned, only sentences are texts.
THROWING = re.compile(
    r"\b(TORCH_(?:CHECK|WARN)\w*\(|throw [\w:]+\(|refuse\(|wrong\("
    r"|return (?!wrong)|what = |wrong \+?= )"
)
LITERAL = r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)\''
TOKEN = re.compile(LITERAL + r"|\w+|\S")
COMMENT = re.compile(LITERAL + r"|//[^\n]*|/\*.*?\*/", re.DOTALL)


def texts() -> Iterator[tuple[str, int, str]]:
    """File, line and text, each text of a line once."""
    python = [*sorted((ROOT / "python").rglob("*.py")), ROOT / "build_tools" / "found.py"]
    native = [path for path in sorted((ROOT / "csrc").rglob("*.*")) if path.suffix != ".map"]
    for path in [*python, ROOT / "setup.py", *native]:
        find = of_python if path.suffix == ".py" else of_cpp
        name = str(path.relative_to(ROOT))
        for line, text in sorted(set(find(path.read_text()))):
            if len(re.findall(r"[\w']{2,}", " ".join(fragments(text)))) > 1:  # else it is a prefix
                yield name, line, text


def fragments(text: str) -> list[str]:
    """The fixed parts of a text."""
    return [part.strip() for part in re.split(r"\.\.\.|\n", text) if part.strip()]


def of_python(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of what is raised or asserted, and of what the functions above are given."""

    def visit(node: ast.AST, names: Names) -> Iterator[tuple[int, str]]:
        said: list[ast.AST | None] = []
        match node:
            case ast.FunctionDef(name=name):
                given = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
                names = {**names, **assigned(ast.walk(node))}
                names = {key: value for key, value in names.items() if key not in given}
                if name in RETURNING:
                    said = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
            case ast.Raise(exc=ast.Call(args=[first, *_])) | ast.Assert(msg=ast.AST() as first):
                said = [first]
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[*_, last]):
                said = [last if name == "run" else node.args[0]] if name in SPEAKING else []
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id="refused"))], value=value):
                said = [value]
        for each in said:
            for text in variants(each, names):
                yield node.lineno, re.sub(r"\.{4,}", "...", text)  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            yield from visit(child, names)

    tree = ast.parse(source)
    yield from visit(tree, assigned(ast.iter_child_nodes(tree)))


def assigned(nodes: Iterator[ast.AST]) -> Names:
    """What is assigned to each name, and what each function returns."""
    found: Names = {}
    for node in nodes:
        pairs: list[tuple[ast.AST, ast.AST | None]] = []
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=to)], value=ast.Tuple(elts=values)):
                pairs = list(zip(to, values, strict=True))
            case ast.Assign(targets=[to], value=value) | ast.NamedExpr(target=to, value=value):
                pairs = [(to, value)]
            case ast.AnnAssign(target=to, value=value):
                pairs = [(to, value)]
            case ast.FunctionDef(name=name):
                returned = [each for each in ast.walk(node) if isinstance(each, ast.Return)]
                pairs = [(ast.Name(name), each.value) for each in returned]
        for to, value in pairs:
            is_empty = isinstance(value, ast.Constant) and value.value in ("", None)
            if isinstance(to, ast.Name) and value is not None and not is_empty:
                found.setdefault(to.id, []).append(value)
    return found


def variants(node: ast.AST | None, names: Names) -> list[str]:
    """The texts that an expression can be."""
    match node:
        case ast.Constant(value=str(text)):
            return [re.sub(r"%[gds]|{!r}", "...", text)]
        case ast.JoinedStr(values=parts):
            return joined(variants(part, names) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return joined([variants(left, names), variants(right, names)])
        case ast.IfExp(body=body, orelse=orelse):
            return variants(body, names) + variants(orelse, names)
        case ast.Dict(values=parts) | ast.Tuple(elts=parts) | ast.BoolOp(values=parts):
            return [text for part in parts for text in variants(part, names)]
        case (
            ast.FormattedValue(value=value)
            | ast.NamedExpr(value=value)
            | ast.DictComp(value=value)
            | ast.BinOp(left=value, op=ast.Mult() | ast.Mod())
            | ast.Call(func=ast.Attribute(value=value, attr="format"))
            | ast.Call(func=ast.Attribute(attr="fromkeys"), args=[_, value])
        ):
            return variants(value, names)
        case (
            ast.Name(id=name)
            | ast.Subscript(value=ast.Name(id=name))
            | ast.Call(func=ast.Name(id=name) | ast.Attribute(value=ast.Name(id=name), attr="get"))
        ) if name in names:
            others = {key: value for key, value in names.items() if key != name}
            return [text for value in names[name] for text in variants(value, others)]
    return ["..."]


def joined(parts: Any) -> list[str]:
    """The texts that parts can be one after the other."""
    return ["".join(each) for each in itertools.product(*parts)]


def of_cpp(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of what is thrown, refused or returned."""
    source = COMMENT.sub(
        lambda found: found[0] if found[0][0] in "\"'" else blank(found[0]), source
    )
    for start in THROWING.finditer(source):
        arguments: list[list[list[str]]] = [[[]]]
        depth = 0
        for token in (found[0] for found in TOKEN.finditer(source, start.end())):
            depth += (token in "([{") - (token in ")]}")
            if depth < 0 or (token == ";" and depth == 0):
                break
            if token == "," and depth == 0:
                arguments.append([[]])
            elif token == "+" and depth == 0:
                arguments[-1].append([])
            else:
                arguments[-1][-1].append(token)
        is_first = start[1].startswith("TORCH_CHECK") or start[1] == "wrong("
        parts = [part for argument in arguments[is_first:] for part in argument]
        for text in joined(map(strings, parts)):
            if not start[1].endswith(" ") or re.search(r"\b(is|has|must) ", text):
                text = text.replace('\\"', '"').replace("\\n", "\n")
                yield source.count("\n", 0, start.start()) + 1, re.sub(r"\.{4,}", "...", text)


def blank(comment: str) -> str:
    """As many lines."""
    return "\n" * comment.count("\n") or " "


def strings(part: list[str]) -> list[str]:
    """The texts that an expression in C++ can be, given as tokens."""
    found = [token[1:-1] for token in part if token[0] == '"']
    if "?" in part and found:
        return found
    is_text = part[:1] == ["std"] or len(found) == len(part)  # std::string("..."), or literals
    return ["".join(found) if is_text and found else "..."]


def messages(page: str) -> list[str]:
    """The lines of a page's text blocks."""
    blocks = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [line.strip() for line in "".join(blocks).splitlines() if line.strip()]


def is_in_code(line: str, known: list[str]) -> bool:
    """Whether some text has all fixed parts of a line of the page, in their order."""
    pattern = re.compile(".*?".join(map(re.escape, fragments(line))), re.DOTALL)
    return any(pattern.search(text) for text in known)


def listed() -> str:
    """Markdown that has every text, by the file that it is in."""
    parts = []
    for file, found in itertools.groupby(texts(), lambda each: each[0]):
        lines = "\n".join(dict.fromkeys(text for _, _, text in found))
        parts.append(f"`{file}`\n\n```text\n{lines}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    for file, line, text in texts():
        print(f"{file}:{line}: {text}")
