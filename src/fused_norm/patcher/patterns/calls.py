"""Calls of an instance's own modules and methods: told from other calls, made, and put in the place of others."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..block import Block
from ..dataflow import Conditions, Dataflow, bodies_of
from ..source import global_of


@dataclass(frozen=True)
class Called:
    """What a call is of: an attribute of the module, ``norms.0`` for one in a list, or a global function.

    Attributes:
        name: its name; ``norms.-1`` counts from the end, ``norms.*`` is any of the list.
        is_function: it is a global function's.
        is_written_out: there is no call, and the name is an expression that computes what such a function does.
    """

    name: str
    is_function: bool = False
    is_written_out: bool = False

    def found_in(self, block: Block) -> Any:
        """What it is of in this module."""
        return global_of(block.origin, self.name) if self.is_function else block.member(self.name)


@dataclass(frozen=True)
class Missed:
    """What cannot be fused as it is written: a sum that reaches a norm, or a product with what may be an activation.

    Attributes:
        source: the sum or the product, as it is written.
        called: the norm that it reaches; the activation that made a factor.
        conditions: those under which it is made, and the norm called, as far as attributes of the module decide it.
        function: the global name of what is called, where it is a sum only if that function returns one; else None.
        attributes: those of the module that are operands of the sum.
    """

    source: str
    called: Called
    conditions: Conditions = ()
    function: str | None = None
    attributes: tuple[str, ...] = ()


class Match:
    """Base of what is found in a forward, and may be rewritten."""

    def bypassed(self, parts: Sequence[str]) -> list[tuple[str, str]]:
        """The modules that a rewrite of these parts takes to be plain: for each, the part that needs it, and its name.

        They are norms and activations that are not called, and who reads a norm. The empty part is all of them.
        """
        return []


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


def operands_of(
    node: ast.AST | None, kind: type[ast.operator], methods: Sequence[str], flow: Dataflow
) -> list[ast.expr]:
    """``[a, b]`` of ``a + b``, ``a += b``, ``a.add(b)`` and ``torch.add(a, b)``; none where it is something else.

    Args:
        node: an expression or statement.
        kind: the operator, here ``ast.Add``.
        methods: the methods and functions of PyTorch that do the same, here ``add``.
        flow: of the function that it is in.
    """
    match node:
        case ast.BinOp(left, operator, right) | ast.AugAssign(left, operator, right) if isinstance(operator, kind):
            return [left, right]
        case ast.Call(ast.Attribute(tensor, method) as func, [*given]) if method in methods and not flow.is_own(func):
            found = given if is_name(tensor, "torch") else [tensor, *given]
            return found if len(found) == 2 else []
    return []


def make_call(own: str, method: str, arguments: list[ast.expr], keywords: list[ast.keyword] | None = None) -> ast.Call:
    """``self.<method>(*arguments, **keywords)``."""
    return ast.Call(ast.Attribute(ast.Name(own, ast.Load()), method, ast.Load()), arguments, keywords or [])


@dataclass(frozen=True)
class EditedForward:
    """A copy of a forward's definition, which rewrites edit one after the other.

    An edit may move an expression to another statement, so a later edit looks up where the expression is by then.

    Attributes:
        definition: the copy.
        own: the name of its first argument, the instance.
    """

    definition: ast.FunctionDef
    own: str

    def insert_before(self, node: ast.AST, *statements: ast.stmt) -> None:
        """Insert statements before the one that is ``node``, or has it in an expression."""
        body, index = self._place_of(node)
        body[index:index] = statements

    def insert_after(self, statement: ast.stmt, *statements: ast.stmt) -> None:
        """Insert statements after another one."""
        body, index = self._place_of(statement)
        body[index + 1 : index + 1] = statements

    def remove(self, statement: ast.stmt) -> None:
        """Remove a statement."""
        body, index = self._place_of(statement)
        del body[index]

    def replace(self, old: ast.expr, new: ast.expr) -> None:
        """Put ``new`` in every place that ``old`` is in."""
        for node in ast.walk(self.definition):
            for field, value in ast.iter_fields(node):
                if value is old:
                    setattr(node, field, new)
                elif isinstance(value, list):
                    value[:] = [new if item is old else item for item in value]

    def _place_of(self, node: ast.AST) -> tuple[list[ast.stmt], int]:
        """The list with the innermost statement that is ``node``, or has it in an expression, and its number there."""
        *_, place = (
            (body, index)
            for body in bodies_of(self.definition)
            for index, statement in enumerate(body)
            if any(node is part for part in ast.walk(statement))
        )
        return place
