"""Calls of an instance's own modules and methods: told from other calls, made, and put in the place of others."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from ..activation_recognition import Activation


@dataclass(frozen=True)
class Rewrite:
    """A match in a forward that is to be fused.

    Attributes:
        pattern: the matches it is one of: ``adds``, ``heads``, ``rotations`` or ``gates``.
        index: its number among these.
        parts: what of it: of an add ``norm``, ``inner`` and ``dropout``; of norms of heads ``rotation``, or nothing.
        activation: that of a gate.
    """

    pattern: str
    index: int
    parts: tuple[str, ...] = ()
    activation: Activation | None = None


def call_of_own(node: ast.AST | None, own: str) -> ast.Call | None:
    """``node`` where it is ``self.<name>(argument)`` or ``self.<name>[<number>](argument)``, else None."""
    match node:
        case ast.Call(
            ast.Attribute(ast.Name(instance)) | ast.Subscript(ast.Attribute(ast.Name(instance)), ast.Constant(int())),
            [argument],
            [],
        ) if instance == own and not isinstance(argument, ast.Starred):
            return node
    return None


def called(call: ast.Call) -> str:
    """``<name>`` or ``<name>.<number>`` of such a call."""
    held = call.func
    if isinstance(held, ast.Subscript):
        assert isinstance(held.slice, ast.Constant)
        assert isinstance(held.value, ast.Attribute)
        return f"{held.value.attr}.{held.slice.value!r}"
    assert isinstance(held, ast.Attribute)
    return held.attr


def is_name(node: ast.AST | None, name: str) -> bool:
    """Return whether an expression is this name."""
    return isinstance(node, ast.Name) and node.id == name


def make_call(own: str, method: str, arguments: list[ast.expr], keywords: list[ast.keyword] | None = None) -> ast.Call:
    """``self.<method>(*arguments, **keywords)``."""
    return ast.Call(ast.Attribute(ast.Name(own, ast.Load()), method, ast.Load()), arguments, keywords or [])


def postpone(call: ast.Call, own: str, postponed: str) -> None:
    """Make of ``self.<name>(argument)`` a call that returns the argument where the one of ``name`` is postponed."""
    call.args = [ast.Name(postponed, ast.Load()), call.func, *call.args]
    call.func = ast.Attribute(ast.Name(own, ast.Load()), "fused_norm_unless_postponed", ast.Load())


def replace(statement: ast.stmt, old: ast.expr, new: ast.expr) -> None:
    """Put ``new`` where ``old`` is in a statement."""
    for node in ast.walk(statement):
        for field, value in ast.iter_fields(node):
            if value is old:
                setattr(node, field, new)
            elif isinstance(value, list):
                setattr(node, field, [new if item is old else item for item in value])
