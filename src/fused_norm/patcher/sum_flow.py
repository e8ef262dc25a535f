"""The flow of sums in a forward: which adds reach a call of a norm, in whatever way that is written.

It is for the report: an add that reaches a norm, and is not one of the forms that ``residual_adds`` rewrites, is kept,
and has a row that says so.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from .residual_adds import PlacedAdd, called_norm, norm_call

_SAME_TENSOR = ("contiguous", "to")
"""Methods that may return the tensor that they are called on."""

Conditions = tuple[tuple[str, bool], ...]
"""Attributes of the module, and what their truth has to be."""

Sums = frozenset[tuple[ast.BinOp | ast.AugAssign | ast.Call, Conditions]]
"""Adds, or calls of functions that add, each with the conditions under which it is made."""

Names = dict[str, Sums]


@dataclass(frozen=True)
class MissedAdd:
    """An add that reaches a norm and cannot be fused with it.

    Attributes:
        norm: the attribute of the norm.
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
        MissedAdd(called_norm(call), ast.unparse(add), tuple(dict.fromkeys(made + called)))
        for call, (sums, called) in flow.calls.items()
        for add, made in sorted(sums, key=lambda one: (one[0].lineno, one[0].col_offset))
        if id(add) not in fused.get(call, ())
    ]
    return list(dict.fromkeys(missed))


class _Flow:
    """A walk through a forward that knows which sums each name may hold.

    Attributes:
        calls: of each call of an attribute of the module, the sums that its argument may be, and the conditions.
    """

    def __init__(self, self_name: str, adds: Callable[[str], bool]) -> None:
        self.calls: dict[ast.Call, tuple[Sums, Conditions]] = {}
        self._own, self._adds = self_name, adds
        self._conditions: Conditions = ()

    def run(self, body: list[ast.stmt], names: Names) -> Names:
        """Walk through statements; return what names hold afterwards."""
        for statement in body:
            names = self._statement(statement, names)
        return names

    def _statement(self, statement: ast.stmt, names: Names) -> Names:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return names
            case ast.Assign() | ast.AnnAssign() if statement.value is not None:
                sums = self._value(statement.value, names)
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                for target in targets:
                    names = _stored(target, sums, names)
                return names
            case ast.AugAssign():
                self._value(statement.value, names)
                added = isinstance(statement.op, ast.Add)
                total: Sums = frozenset([(statement, self._conditions)] if added else [])
                return _stored(statement.target, total, names)
            case ast.If():
                self._value(statement.test, names)
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
            self._value(part, names)
        return names

    def _under(self, test: ast.expr, truth: bool, body: list[ast.stmt], names: Names) -> Names:
        """Walk through an arm of an ``if``."""
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, truth = test.operand, not truth
        known = isinstance(test, ast.Attribute) and isinstance(test.value, ast.Name) and test.value.id == self._own
        if not known:
            return self.run(body, names)
        assert isinstance(test, ast.Attribute)
        outside, self._conditions = self._conditions, (*self._conditions, (test.attr, truth))
        after = self.run(body, names)
        self._conditions = outside
        return after

    def _value(self, node: ast.AST, names: Names) -> Sums:
        """The sums that an expression may be; the calls in it are noted."""
        inside = [self._value(part, names) for part in ast.iter_child_nodes(node)]
        match node:
            case ast.Name():
                return names.get(node.id, frozenset())
            case ast.BinOp(op=ast.Add()):
                return frozenset([(node, self._conditions)])
            case ast.IfExp():
                return inside[1] | inside[2]
            case ast.Call(func=ast.Name(id=name)) if self._adds(name):
                return frozenset([(node, self._conditions)])
            case ast.Call(func=ast.Attribute(attr=method)) if method in _SAME_TENSOR:
                assert isinstance(node.func, ast.Attribute)
                return self._value(node.func.value, names)
        call = norm_call(node, self._own)
        if call is not None:
            sums, _ = self.calls.get(call, (frozenset(), ()))
            self.calls[call] = (sums | self._value(call.args[0], names), self._conditions)
        return frozenset()


def _stored(target: ast.expr, sums: Sums, names: Names) -> Names:
    """``names`` after an assignment of what may be these sums."""
    if isinstance(target, ast.Name):
        return names | {target.id: sums}
    changed = {node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {name: held for name, held in names.items() if name not in changed}


def _joined(one: Names, other: Names) -> Names:
    """The names after two ways that meet."""
    return {name: one.get(name, frozenset()) | other.get(name, frozenset()) for name in one | other}
