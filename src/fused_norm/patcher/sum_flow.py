"""The flow of sums in a forward: which adds reach a call of a norm, in whatever way that is written.

It is for the report: an add that reaches a norm, and is not one of the forms that ``residual_adds`` rewrites, is kept,
and has a row that says so.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

from .residual_adds import PlacedAdd, called_norm, norm_call

_SAME_TENSOR = ("contiguous", "float", "to", "type", "type_as")
"""Methods that may return the tensor that they are called on."""

_ADD = ("add", "add_")
"""Methods and functions of PyTorch that add."""

Conditions = tuple[tuple[str, bool], ...]
"""Attributes of the module, and what their truth has to be."""

Sums = frozenset[tuple[ast.BinOp | ast.AugAssign | ast.Call, Conditions]]
"""Adds, or calls of functions that add, each with the conditions under which it is made."""

Names = dict[str, Sums]


@dataclass(frozen=True)
class MissedAdd:
    """An add that reaches a norm and cannot be fused with it.

    Attributes:
        norm: the attribute of the norm, ``norms.0`` or ``norms.-1`` for one in a list, ``norms.*`` for any of them.
        source: the add, as it is written.
        conditions: those under which it is made and the norm is called, as far as attributes of the module decide it.
    """

    norm: str
    source: str
    conditions: Conditions


def find_missed_adds(
    definition: ast.FunctionDef, places: list[PlacedAdd], self_name: str, adds: Callable[[str], bool]
) -> list[MissedAdd]:
    """The adds that reach a norm and are not fused with it where all of ``places`` are fused, each one once.

    ``adds``: whether the function that a global name stands for returns a sum.
    """
    flow = _Flow(self_name, adds)
    flow.run(definition.body, {})
    fused = {
        place.use.call: {id(node) for node in ast.walk(place.statement)} for place in places if place.use is not None
    }
    missed = [
        MissedAdd(norm, ast.unparse(add), tuple(dict.fromkeys(made + called)))
        for call, (norm, sums, called) in flow.calls.items()
        for add, made in sorted(sums, key=lambda one: (one[0].lineno, one[0].col_offset))
        if id(add) not in fused.get(call, ())
    ]
    return list(dict.fromkeys(missed))


class _Flow:
    """A walk through a forward that knows which sums each name may hold.

    Attributes:
        calls: of each call of an attribute of the module, that attribute, the sums that its argument may be, and the
            conditions.
    """

    def __init__(self, self_name: str, adds: Callable[[str], bool]) -> None:
        self.calls: dict[ast.Call, tuple[str, Sums, Conditions]] = {}
        self._own, self._adds = self_name, adds
        self._conditions: Conditions = ()
        self._inside: Names = {}  # what the expressions of the statement assign

    def run(self, body: list[ast.stmt], names: Names) -> Names:
        """Walk through statements; return what names hold afterwards."""
        for statement in body:
            names = self._statement(statement, names)
        return names

    def _statement(self, statement: ast.stmt, names: Names) -> Names:
        self._inside = {}
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return names
            case ast.Assign() | ast.AnnAssign() if statement.value is not None:
                sums = self._value(statement.value, names)
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                before = names = names | self._inside
                for target in targets:
                    names = _stored(target, sums, names)
                    if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                        for one, value in zip(target.elts, statement.value.elts, strict=False):
                            names = _stored(one, self._value(value, before), names)
                return names
            case ast.AugAssign():
                self._value(statement.value, names)
                added = isinstance(statement.op, ast.Add)
                total: Sums = frozenset([(statement, self._conditions)] if added else [])
                return _stored(statement.target, total, names)
            case ast.If():
                self._value(statement.test, names)
                names = names | self._inside
                return _joined(
                    self._under(statement.test, True, statement.body, names),
                    self._under(statement.test, False, statement.orelse, names),
                )
            case ast.For() | ast.AsyncFor() | ast.While():
                for _ in range(2):  # what one turn leaves in a name, the next one finds
                    inside = names
                    if not isinstance(statement, ast.While):
                        inside = _stored(statement.target, frozenset(), names)
                    names = _joined(names, self.run(statement.body, inside))
                return _joined(names, self.run(statement.orelse, names))
            case ast.With() | ast.AsyncWith():
                return self.run(statement.body, names)
            case ast.Try():
                after = self.run(statement.body, names)
                for handler in statement.handlers:
                    after = _joined(after, self.run(handler.body, _joined(names, after)))
                return self.run(statement.finalbody, self.run(statement.orelse, after))
        for part in ast.iter_child_nodes(statement):
            sums = self._value(part, names)
            if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "add_":
                names = _stored(part.func.value, sums, names)
        return names | self._inside

    def _under(self, test: ast.expr, truth: bool, body: list[ast.stmt], names: Names) -> Names:
        """Walk through an arm of an ``if``."""
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, truth = test.operand, not truth
        if not self._is_own(test) or test.attr == "training":  # which is one today and the other tomorrow
            return self.run(body, names)
        outside, self._conditions = self._conditions, (*self._conditions, (test.attr, truth))
        after = self.run(body, names)
        self._conditions = outside
        return after

    def _is_own(self, node: ast.expr) -> TypeGuard[ast.Attribute]:
        return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self._own

    def _value(self, node: ast.AST, names: Names) -> Sums:
        """The sums that an expression may be; the calls in it are noted."""
        inside = [self._value(part, names) for part in ast.iter_child_nodes(node)]
        here: Sums = frozenset([(node, self._conditions)] if isinstance(node, (ast.BinOp, ast.Call)) else [])
        match node:
            case ast.Name():
                return self._inside.get(node.id, names.get(node.id, frozenset()))
            case ast.NamedExpr():
                self._inside = _stored(node.target, inside[1], self._inside)
                return inside[1]
            case ast.BinOp(op=ast.Add()):
                return here
            case ast.IfExp():
                return inside[1] | inside[2]
            case ast.Call(func=ast.Attribute(attr=method)) if method in _ADD and not self._is_own(node.func):
                return here
            case ast.Call(func=ast.Name(id=name)) if self._adds(name):
                return here
            case ast.Call(func=ast.Attribute(attr=method)) if method in _SAME_TENSOR:
                assert isinstance(node.func, ast.Attribute)
                return self._value(node.func.value, names)
        if isinstance(node, ast.Call) and (norm := self._called(node)) is not None:
            (argument,) = *node.args, *(one.value for one in node.keywords)
            _, sums, _ = self.calls.get(node, (norm, frozenset(), ()))
            self.calls[node] = norm, sums | self._value(argument, names), self._conditions
        return frozenset()

    def _called(self, call: ast.Call) -> str | None:
        """The attribute of the module that a call of one tensor is of."""
        if norm_call(call, self._own) is not None:
            return called_norm(call)
        if len(call.args) + len(call.keywords) != 1 or any(isinstance(one, ast.Starred) for one in call.args):
            return None
        if self._is_own(call.func):
            return call.func.attr
        if isinstance(call.func, ast.Subscript) and self._is_own(call.func.value):
            number = ast.unparse(call.func.slice)
            return f"{call.func.value.attr}.{number if re.fullmatch(r'-[0-9]+', number) else '*'}"
        return None


def _stored(target: ast.expr, sums: Sums, names: Names) -> Names:
    """``names`` after an assignment of what may be these sums."""
    if isinstance(target, ast.Name):
        return names | {target.id: sums}
    changed = {node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {name: held for name, held in names.items() if name not in changed}


def _joined(one: Names, other: Names) -> Names:
    """The names after two ways that meet."""
    return {name: one.get(name, frozenset()) | other.get(name, frozenset()) for name in one | other}
