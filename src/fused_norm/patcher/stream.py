"""The adds of a layer's residual stream: found in its source by following the sum, and handed to fused calls.

In the forward of a layer,

    hidden = self.inner(hidden)
    hidden = residual + hidden
    residual = hidden
    hidden = self.norm(hidden)

becomes, whatever the names are,

    y, hidden = self.fused_norm_add(self.norm, residual, hidden, inner=self.inner)
    residual = hidden
    hidden = y

Every name keeps the value it had, and everything else in the forward stays as upstream wrote it. ``inner``, the norm of
the branch itself, is where there is one; so is ``scale``, a factor of the branch that is an attribute of the layer. A
sum that the layer returns becomes

    hidden = self.fused_norm_last(residual, hidden)

and a normed branch that is only added

    hidden = self.fused_norm_onto(self.inner, residual, hidden)
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_Y = "_fused_norm_y"


@dataclass(frozen=True)
class Add:
    """One residual add.

    Attributes:
        norm: the attribute of the norm that takes the sum next, None where none does.
        inner: the attribute of the norm whose result is added, None where something else is.
        last: whether the layer returns the sum.
    """

    norm: str | None
    inner: str | None
    last: bool


@dataclass(frozen=True)
class AddRewrite:
    """What is fused with the add number ``index``: the norm after it (the next layer's, if last), the inner."""

    index: int
    norm: bool
    inner: bool


@dataclass
class PlacedAdd:
    """An ``Add`` and the statements it is made of, in ``body``.

    Attributes:
        residual, branch: its operands; the branch is the one with an inner norm or a factor, if there is one.
        normed: the statement that makes the branch by the inner norm, None where that is part of the add.
        inner_call: the call of the inner norm.
        scale: the factor of the branch.
        use: the statement that calls the norm with the sum.
    """

    add: Add
    body: list[ast.stmt]
    statement: ast.Assign
    residual: ast.expr
    branch: ast.expr
    normed: ast.stmt | None
    inner_call: ast.Call | None
    scale: ast.expr | None
    use: ast.Assign | ast.Return | None


def find_adds(definition: ast.FunctionDef, self_name: str) -> list[PlacedAdd]:
    """The adds that can be fused with a norm around them, in order."""
    found: list[PlacedAdd] = []
    for body in bodies(definition):
        for position in range(len(body)):
            taken = [earlier.use for earlier in found]  # what takes one sum is not the inner norm of another
            before = body[position - 1] if position and body[position - 1] not in taken else None
            place = _add_at(body, position, before, self_name)
            if place is not None:
                found.append(place)
    return found


def hand_over(place: PlacedAdd, rewrite: AddRewrite, self_name: str) -> None:
    """Puts the fused call in the add's place."""
    norm = place.use.value.func if place.use and rewrite.norm else None  # type: ignore[union-attr]
    branch, scale, named = place.branch, place.scale, []
    if rewrite.inner and place.inner_call is not None:
        named.append(ast.keyword("inner", place.inner_call.func))
        branch = place.inner_call.args[0]
        if place.normed is not None:
            place.body.remove(place.normed)
    if norm is None and not (place.add.last and rewrite.norm):
        name, arguments, named = "fused_norm_onto", [named[0].value, place.residual, branch], []
    else:
        name = "fused_norm_add" if norm is not None else "fused_norm_last"
        arguments = [*([norm] if norm is not None else []), place.residual, branch]
        if scale is not None:
            named.append(ast.keyword("scale", scale))
    call = ast.Call(ast.Attribute(ast.Name(self_name, ast.Load()), name, ast.Load()), arguments, named)
    if norm is None:
        place.statement.value = call
        return
    assert place.use is not None
    y = ast.Tuple([ast.Name(_Y, ast.Store()), place.statement.targets[0]], ast.Store())
    place.statement.targets, place.statement.value = [y], call
    place.use.value = ast.Name(_Y, ast.Load())
    if isinstance(place.use, ast.Assign):  # the name must not keep y alive longer than stock would
        place.body.insert(place.body.index(place.use) + 1, ast.Delete([ast.Name(_Y, ast.Del())]))


def first_norm(definition: ast.FunctionDef, self_name: str) -> str | None:
    """The attribute of the norm that takes the layer's input before anything else does, None where there is none."""
    arguments = [*definition.args.posonlyargs, *definition.args.args]
    if len(arguments) < 2:
        return None
    stream = arguments[1].arg
    for statement in definition.body:
        call = _norm_call(statement, stream, self_name)
        if call is not None:
            return _attribute(call)
        if mentions(statement, stream) and not _is_copy(statement, unless_to=stream):
            return None
    return None


def edits_in_place(part: ast.AST) -> bool:
    """Whether a statement in it may write into a tensor that a name holds: ``h *= a``, ``h[i] = a``, ``h.add_(a)``."""
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
    """Whether any of the names occurs in a statement."""
    return any(isinstance(inner, ast.Name) and inner.id in names for inner in ast.walk(node))


def call_of_own(node: ast.AST | None, self_name: str) -> ast.Call | None:
    """``node`` where it is ``self.<name>(argument)``."""
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


def _add_at(body: list[ast.stmt], position: int, before: ast.stmt | None, self_name: str) -> PlacedAdd | None:
    statement = body[position]
    total = _target_of_add(statement)
    if total is None:
        return None
    assert isinstance(statement, ast.Assign)
    assert isinstance(statement.value, ast.BinOp)
    after = position + 1
    while after < len(body) and _is_copy(body[after], unless_to=total):
        after += 1
    following = body[after] if after < len(body) else None
    norm = _norm_call(following, total, self_name)
    last = isinstance(following, ast.Return) and _is_name(following.value, total)
    residual, branch = statement.value.left, statement.value.right
    inner, normed = _inner_norm(branch, residual, before, total, self_name)
    if inner is None:
        inner, normed = _inner_norm(residual, branch, before, total, self_name)
        if inner is not None:
            residual, branch = branch, residual
    scale = None
    for one, other in ((branch, residual), (residual, branch)):
        if inner is None and scale is None and (factors := _factors(one, self_name)) is not None:
            residual, (branch, scale) = other, factors
    if norm is None and inner is None and not last:
        return None
    add = Add(None if norm is None else _attribute(norm), None if inner is None else _attribute(inner), last)
    use = following if norm is not None else None
    return PlacedAdd(add, body, statement, residual, branch, normed, inner, scale, use)  # type: ignore[arg-type]


def _inner_norm(
    operand: ast.expr, other: ast.expr, before: ast.stmt | None, total: str, self_name: str
) -> tuple[ast.Call | None, ast.Assign | None]:
    """The call ``self.<inner>(argument)`` that an operand is, and the statement in front that makes it."""
    if isinstance(before, ast.Assign) and _is_name(operand, total) and _assigns(before, total):
        if not isinstance(other, ast.Name) or other.id == total:  # it would see what was there before
            return None, None
        call = call_of_own(before.value, self_name)
        return call, None if call is None else before
    return call_of_own(operand, self_name), None


def _factors(node: ast.expr, self_name: str) -> tuple[ast.expr, ast.expr] | None:
    """``(branch, self.<factor>)`` of their product."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        for branch, factor in ((node.left, node.right), (node.right, node.left)):
            if isinstance(factor, ast.Attribute) and _is_name(factor.value, self_name):
                return branch, factor
    return None


def _target_of_add(statement: ast.stmt) -> str | None:
    """``h`` of ``h = a + b``."""
    if (
        isinstance(statement, ast.Assign)
        and len(statement.targets) == 1
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.BinOp)
        and isinstance(statement.value.op, ast.Add)
    ):
        return statement.targets[0].id
    return None


def _assigns(statement: ast.stmt | None, name: str) -> bool:
    """Whether it is ``name = ...``, and nothing else is assigned."""
    return isinstance(statement, ast.Assign) and len(statement.targets) == 1 and _is_name(statement.targets[0], name)


def _is_copy(statement: ast.stmt, unless_to: str) -> bool:
    """``a = b`` between names, to another name than ``unless_to``."""
    return (
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Name)
        and all(isinstance(target, ast.Name) and target.id != unless_to for target in statement.targets)
    )


def _is_name(node: ast.AST | None, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _norm_call(statement: ast.stmt | None, total: str, self_name: str) -> ast.Call | None:
    """``self.<norm>(total)``, where it is all that a statement assigns to a name or returns."""
    if not isinstance(statement, (ast.Assign, ast.Return)):
        return None
    if isinstance(statement, ast.Assign) and not all(isinstance(target, ast.Name) for target in statement.targets):
        return None
    call = call_of_own(statement.value, self_name)
    return call if call is not None and _is_name(call.args[0], total) else None


def _attribute(call: ast.Call) -> str:
    assert isinstance(call.func, ast.Attribute)
    return call.func.attr
