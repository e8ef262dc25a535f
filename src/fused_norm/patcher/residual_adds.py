"""The adds of a layer's residual stream: found in its source by following the sum, and replaced by fused calls.

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
the branch itself, is where there is one; so is ``scale``, a factor of the branch that is an attribute of the layer.
Where no norm of the layer takes the sum, the normed branch is still fused with its add:

    hidden = self.fused_norm_onto(self.inner, residual, hidden)
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from .statements import bodies, call_of_own, called_attribute, make_call

_Y = "_fused_norm_y"


@dataclass(frozen=True)
class Add:
    """One residual add.

    Attributes:
        norm: the attribute of the norm that takes the sum next, None where none does.
        inner: the attribute of the norm whose result is added, None where something else is.
    """

    norm: str | None
    inner: str | None


@dataclass(frozen=True)
class AddRewrite:
    """The add number ``index``, to be fused with the norm after it, with its inner norm, or with both."""

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
    """The adds that can be fused with a norm before or after them, in order."""
    found: list[PlacedAdd] = []
    for body in bodies(definition):
        for position in range(len(body)):
            taken = [earlier.use for earlier in found]  # what takes one sum is not the inner norm of another
            before = body[position - 1] if position and body[position - 1] not in taken else None
            place = _add_at(body, position, before, self_name)
            if place is not None:
                found.append(place)
    return found


def fuse_add(place: PlacedAdd, rewrite: AddRewrite, self_name: str) -> None:
    """Put the fused call in the add's place."""
    branch, inner, keywords = place.branch, None, []
    if rewrite.inner and place.inner_call is not None:
        branch, inner = place.inner_call.args[0], place.inner_call.func
        keywords.append(ast.keyword("inner", inner))
        if place.normed is not None:
            place.body.remove(place.normed)
    if not rewrite.norm or place.use is None:
        assert inner is not None
        place.statement.value = make_call(self_name, "fused_norm_onto", [inner, place.residual, branch], [])
        return
    if place.scale is not None:
        keywords.append(ast.keyword("scale", place.scale))
    norm = place.use.value.func  # type: ignore[union-attr]
    y = ast.Tuple([ast.Name(_Y, ast.Store()), place.statement.targets[0]], ast.Store())
    place.statement.targets = [y]
    place.statement.value = make_call(self_name, "fused_norm_add", [norm, place.residual, branch], keywords)
    place.use.value = ast.Name(_Y, ast.Load())
    if isinstance(place.use, ast.Assign):  # the name must not keep y alive longer than stock would
        place.body.insert(place.body.index(place.use) + 1, ast.Delete([ast.Name(_Y, ast.Del())]))


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
    residual, branch = statement.value.left, statement.value.right
    inner, normed = _inner_norm(branch, residual, before, total, self_name)
    if inner is None:
        inner, normed = _inner_norm(residual, branch, before, total, self_name)
        if inner is not None:
            residual, branch = branch, residual
    if norm is None and inner is None:
        return None
    scale = None
    for one, other in ((branch, residual), (residual, branch)):
        if inner is None and scale is None and (factors := _factors(one, self_name)) is not None:
            residual, (branch, scale) = other, factors
    add = Add(None if norm is None else called_attribute(norm), None if inner is None else called_attribute(inner))
    use = following if norm is not None else None
    return PlacedAdd(add, body, statement, residual, branch, normed, inner, scale, use)  # type: ignore[arg-type]


def _inner_norm(
    operand: ast.expr, other: ast.expr, before: ast.stmt | None, total: str, self_name: str
) -> tuple[ast.Call | None, ast.Assign | None]:
    """The call ``self.<inner>(argument)`` that makes an operand, and the statement before the add where it stands."""
    if isinstance(before, ast.Assign) and _is_name(operand, total) and _assigns(before, total):
        if not isinstance(other, ast.Name) or other.id == total:  # it would see what was there before
            return None, None
        call = call_of_own(before.value, self_name)
        return call, None if call is None else before
    return call_of_own(operand, self_name), None


def _factors(node: ast.expr, self_name: str) -> tuple[ast.expr, ast.expr] | None:
    """``(branch, self.<factor>)`` where ``node`` is their product."""
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
    """Return whether a statement is ``name = ...``, and assigns nothing else."""
    return isinstance(statement, ast.Assign) and len(statement.targets) == 1 and _is_name(statement.targets[0], name)


def _is_copy(statement: ast.stmt, unless_to: str) -> bool:
    """Return whether a statement is ``a = b`` between names, where ``a`` is another name than ``unless_to``."""
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
