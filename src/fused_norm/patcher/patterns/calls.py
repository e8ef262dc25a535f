"""Calls of an instance's own modules and methods, and how patterns recognise and edit them in a forward."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..block import Block
from ..dataflow import Conditions, Dataflow, bodies_of
from ..source import global_of


@dataclass(frozen=True)
class Callee:
    """What a call calls: an attribute of the module, ``norms.0`` for a module in a list, or a global function.

    Attributes:
        name: its name; ``norms.-1`` counts from the end, ``norms.*`` is any of the list.
        is_function: it is a global function.
        is_written_out: there is no call: the name is an expression that computes what such a function does.
    """

    name: str
    is_function: bool = False
    is_written_out: bool = False

    def resolve(self, block: Block, function: Any = None) -> Any:
        """What the name stands for in a module; a global name is one of ``function``, or of the module's forward."""
        return global_of(function or block.origin, self.name) if self.is_function else block.member(self.name)


@dataclass(frozen=True)
class Missed:
    """Something that is not fused as it is written: a sum that reaches a norm, or a product with an activation.

    Attributes:
        source: the sum or the product.
        callee: the norm that the sum reaches; the activation that makes a factor.
        conditions: those on settings of the module under which it is computed, and the norm called.
        function: the global name of a called function, if this is a sum only if that function returns one.
        attributes: those of the module that are operands of the sum.
    """

    source: str
    callee: Callee
    conditions: Conditions = ()
    function: str | None = None
    attributes: tuple[str, ...] = ()


class Match:
    """Base of what a pattern matches in a forward; it prints its nodes as source."""

    def bypassed(self, parts: Sequence[str]) -> list[str]:
        """The names of the norms and the activation that a rewrite of these parts computes without a call."""
        return []

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={_shown(value)}' for name, value in values.items())})"


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return f"`{ast.unparse(value)}`" if isinstance(value, ast.AST) else repr(value)


def call_of_own(node: ast.AST | None, own: str) -> ast.Call | None:
    """``node`` if it is ``self.<name>(argument)`` or ``self.<name>[<number>](argument)``, else None."""
    match node:
        case ast.Call(
            ast.Attribute(ast.Name(instance)) | ast.Subscript(ast.Attribute(ast.Name(instance)), ast.Constant(int())),
            [argument],
            [],
        ) if instance == own and not isinstance(argument, ast.Starred):
            return node
    return None


def callee_name(call: ast.Call) -> str:
    """``<name>`` or ``<name>.<number>`` of such a call."""
    match call.func:
        case ast.Subscript(ast.Attribute(attr=name), ast.Constant(number)):
            return f"{name}.{number!r}"
        case ast.Attribute(attr=name):
            return name
    raise AssertionError(ast.unparse(call))


def is_name(node: ast.AST | None, name: str) -> bool:
    """Return whether an expression is this name."""
    return isinstance(node, ast.Name) and node.id == name


def operands_of(
    node: ast.AST | None, kind: type[ast.operator], methods: Sequence[str], flow: Dataflow
) -> list[ast.expr]:
    """``[a, b]`` of ``a + b``, ``a += b``, ``a.add(b)`` and ``torch.add(a, b)``, or an empty list.

    Args:
        node: an expression or statement.
        kind: the operator, here ``ast.Add``.
        methods: the methods and functions of PyTorch that do the same, here ``add``.
        flow: of the forward that contains it.
    """
    match node:
        case ast.BinOp(left, operator, right) | ast.AugAssign(left, operator, right) if isinstance(operator, kind):
            return [left, right]
        case ast.Call(ast.Attribute(tensor, method) as func, [*args]) if method in methods and not flow.is_own(func):
            operands = args if is_name(tensor, "torch") else [tensor, *args]
            return operands if len(operands) == 2 else []
    return []


@dataclass(frozen=True)
class EditedForward:
    """A copy of a forward's definition, which rewrites edit one after the other.

    An edit may move an expression to another statement, so every edit looks up where its expression is.

    Attributes:
        definition: the copy.
        own: the name of its first argument, the instance.
    """

    definition: ast.FunctionDef
    own: str

    def code(self, source: str, **nodes: ast.expr) -> Any:
        """Parse an expression or a statement, with nodes in the place of their names; ``self`` is the instance."""
        (statement,) = ast.parse(source).body
        nodes["self"] = ast.Name(self.own, ast.Load())
        for name in [node for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id in nodes]:
            self.replace(name, nodes[name.id], statement)
        return statement.value if isinstance(statement, ast.Expr) else statement

    def insert_before(self, node: ast.AST, *statements: ast.stmt) -> None:
        """Insert statements before the one that is ``node``, or contains it in an expression."""
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

    def replace(self, old: ast.expr, new: ast.expr, code: ast.AST | None = None) -> None:
        """Put ``new`` in every place of ``old``, in the definition or in other ``code``."""
        for node in ast.walk(code or self.definition):
            for field, value in ast.iter_fields(node):
                if value is old:
                    setattr(node, field, new)
                elif isinstance(value, list):
                    value[:] = [new if item is old else item for item in value]

    def _place_of(self, node: ast.AST) -> tuple[list[ast.stmt], int]:
        """The body with the innermost statement that is or contains ``node``, and that statement's index."""
        *_, place = (
            (body, index)
            for body in bodies_of(self.definition)
            for index, statement in enumerate(body)
            if any(node is part for part in ast.walk(statement))
        )
        return place
