"""What a Python file has in it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    """A file's syntax tree; made for the tests that look at it, not wherever they are collected."""
    return ast.parse(path.read_text())


def defined_in(tree: ast.AST) -> set[str]:
    """Functions, classes, and variables and attributes that a module assigns."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names
