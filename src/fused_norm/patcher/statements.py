"""Questions about the statements of a function, and small changes of them, for the patterns in a forward."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements that belongs to this function itself."""
    for field in ("body", "orelse", "finalbody"):
        body = getattr(node, field, None)
        if isinstance(body, list):
            yield body
            for statement in body:
                if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    yield from bodies(statement)
    for handler in getattr(node, "handlers", ()):
        yield from bodies(handler)


def mentions(node: ast.AST, *names: str) -> bool:
    """Return whether any of the names occurs in a statement."""
    return any(isinstance(inner, ast.Name) and inner.id in names for inner in ast.walk(node))


def edits_in_place(part: ast.AST) -> bool:
    """Return whether a statement may write into a tensor that a name holds: ``h *= a``, ``h[i] = a``, ``h.add_(a)``."""
    for node in ast.walk(part):
        if isinstance(node, ast.AugAssign):
            return True
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if name.endswith("_") and not name.endswith("__"):
                return True
    return False


def call_of_own(node: ast.AST | None, self_name: str) -> ast.Call | None:
    """``node`` where it is ``self.<name>(argument)``, else None."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == self_name
        and not node.keywords
        and len(node.args) == 1
        and not isinstance(node.args[0], ast.Starred)
    ):
        return node
    return None


def called_attribute(call: ast.Call) -> str:
    """``<name>`` of such a call."""
    assert isinstance(call.func, ast.Attribute)
    return call.func.attr


def make_call(self_name: str, method: str, arguments: list[ast.expr], keywords: list[ast.keyword]) -> ast.Call:
    """``self.<method>(*arguments, **keywords)``."""
    return ast.Call(ast.Attribute(ast.Name(self_name, ast.Load()), method, ast.Load()), arguments, keywords)


def replace(statement: ast.stmt, old: ast.expr, new: ast.expr) -> None:
    """Put ``new`` where ``old`` is in a statement."""
    for node in ast.walk(statement):
        for field, value in ast.iter_fields(node):
            if value is old:
                setattr(node, field, new)
            elif isinstance(value, list):
                setattr(node, field, [new if item is old else item for item in value])
