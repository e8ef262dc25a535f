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
the branch itself, is where there is one, and so is a ``dropout`` behind it; ``scale`` is a factor of the branch that is
an attribute of the layer. Where no norm of the layer takes the sum, the normed branch is still fused with its add:

    hidden = self.fused_norm_onto(self.inner, residual, hidden)

The norm may be called inside an expression, if nothing else is computed there before it:

    hidden = hidden + self.attention(self.norm1(hidden))
    hidden = hidden + self.mlp(self.norm2(hidden))

becomes

    y, hidden = self.fused_norm_add(self.norm2, hidden, self.attention(self.norm1(hidden)))
    hidden = hidden + self.mlp(y)

Operands are computed in their order: where the branch comes first, ``branch=..., residual=...`` say which is which.

Where there is an add only under a condition, or a call of the norm, so there is a fused call.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

from .statements import bodies, make_call, mentions, replace

_Y = "_fused_norm_y"


@dataclass(frozen=True)
class Add:
    """One residual add.

    Attributes:
        norm: the attribute of the norm that takes the sum next, None where none does; ``norms.0`` for one in a list.
        inner: the attribute of the norm whose result is added, None where something else is.
        before_inner: the attribute of the norm in front of ``inner``, which may be a dropout; None where there is none.
    """

    norm: str | None
    inner: str | None
    before_inner: str | None = None


@dataclass(frozen=True)
class AddRewrite:
    """The add number ``index``, to be fused with the norm after it, with its inner norm, or with both.

    ``dropout``: what is called the inner norm is a dropout, and the norm is the one in front of it.
    """

    index: int
    norm: bool
    inner: bool
    dropout: bool = False


@dataclass
class Use:
    """The call of a norm with a sum: ``call`` in ``statement``, in ``body``.

    Attributes:
        condition: the test of the ``if`` that the call is in, and the add is not; None where there is none.
    """

    body: list[ast.stmt]
    statement: ast.Assign | ast.Return
    call: ast.Call
    condition: ast.expr | None


@dataclass
class PlacedAdd:
    """An ``Add`` and the statements it is made of, in ``body``.

    Attributes:
        residual, branch: its operands; the branch is the one with an inner norm or a factor, if there is one.
        branch_first: the branch is the first operand.
        choice: ``residual + branch if test else name``, None where the add is not part of such an expression.
        normed: the statement that makes the branch by the inner norm, None where that is part of the add.
        inner_call: the call of the inner norm.
        before: the call of the norm in front of it, and its statement, None where there is none.
        scale: the factor of the branch.
        use: the call of the norm with the sum.
    """

    add: Add
    body: list[ast.stmt]
    statement: ast.Assign | ast.Return
    residual: ast.expr
    branch: ast.expr
    branch_first: bool
    choice: ast.IfExp | None
    normed: ast.stmt | None
    inner_call: ast.Call | None
    before: tuple[ast.Call, ast.Assign] | None
    scale: ast.expr | None
    use: Use | None


def find_adds(definition: ast.FunctionDef, self_name: str) -> list[PlacedAdd]:
    """The adds that can be fused with a norm before or after them, in order."""
    found: list[PlacedAdd] = []
    for body in bodies(definition):
        for position in range(len(body)):
            place = _add_at(definition, body, position, [one.use for one in found if one.use is not None], self_name)
            if place is not None:
                found.append(place)
    return found


def fuse_add(place: PlacedAdd, rewrite: AddRewrite, self_name: str) -> None:
    """Put the fused call in the add's place."""
    branch, inner, keywords = place.branch, None, []
    stock, dropout = place.statement.value, []
    assert stock is not None
    if rewrite.inner and place.inner_call is not None:
        call, normed = place.inner_call, place.normed
        if rewrite.dropout and place.before is not None:
            dropout.append(ast.keyword("dropout", call.func))
            call, normed = place.before
        branch, inner = call.args[0], call.func
        keywords += [ast.keyword("inner", inner), *dropout]
        if normed is not None:
            place.body.remove(normed)
        stock = _call_with_operands(place, self_name, "fused_norm_onto", inner, branch, dropout)
    if not rewrite.norm or place.use is None or isinstance(place.statement, ast.Return):
        place.statement.value = stock
        return
    if place.scale is not None:
        keywords.append(ast.keyword("scale", place.scale))
    use, y = place.use, f"{_Y}{rewrite.index}"
    norm = use.call.func
    fused: ast.expr = _call_with_operands(place, self_name, "fused_norm_add", norm, branch, keywords)
    if place.choice is not None:
        name = place.choice.orelse
        without = ast.Tuple([ast.Call(copy.deepcopy(norm), [name], []), copy.deepcopy(name)], ast.Load())
        fused = ast.IfExp(place.choice.test, fused, without)
    elif use.condition is not None:
        without = ast.Tuple([ast.Constant(None), copy.deepcopy(stock)], ast.Load())
        fused = ast.IfExp(copy.deepcopy(use.condition), fused, without)
    place.statement.targets = [ast.Tuple([ast.Name(y, ast.Store()), place.statement.targets[0]], ast.Store())]
    place.statement.value = fused
    replace(use.statement, use.call, ast.Name(y, ast.Load()))
    if isinstance(use.statement, ast.Assign):  # the name must not keep y alive longer than stock would
        use.body.insert(use.body.index(use.statement) + 1, ast.Delete([ast.Name(y, ast.Del())]))


def _call_with_operands(
    place: PlacedAdd, self_name: str, method: str, norm: ast.expr, branch: ast.expr, keywords: list[ast.keyword]
) -> ast.Call:
    """``self.<method>(norm, residual, branch)``, which computes both in their order: dropout, say, draws by turns."""
    if not place.branch_first:
        return make_call(self_name, method, [norm, place.residual, branch], keywords)
    operands = [ast.keyword("branch", branch), ast.keyword("residual", place.residual)]
    return make_call(self_name, method, [norm], [*operands, *keywords])


def _add_at(
    definition: ast.FunctionDef, body: list[ast.stmt], position: int, taken: list[Use], self_name: str
) -> PlacedAdd | None:
    """The add in statement number ``position``. Its inner norm is none that is ``taken`` by a sum before it."""
    statement = body[position]
    total, choice = _target(statement), None
    if total is None or not isinstance(statement, (ast.Assign, ast.Return)) or statement.value is None:
        return None
    value = statement.value
    if isinstance(value, ast.IfExp) and isinstance(statement, ast.Assign):
        choice = _sum_first(value)
        value = choice.body
    if not _is_add(value) or (choice is not None and not isinstance(choice.orelse, ast.Name)):
        return None
    assert isinstance(value, ast.BinOp)
    residual, branch = value.left, value.right
    if any(use.call in (residual, branch) for use in taken):
        return None
    inner = normed = behind = None
    if choice is None:
        before = body[position - 1] if position else None
        if any(before is use.statement for use in taken):
            before = None
        inner, normed = _inner_norm(definition, body, branch, residual, before, total, self_name)
        if inner is None:
            inner, normed = _inner_norm(definition, body, residual, branch, before, total, self_name)
            if inner is not None:
                residual, branch = branch, residual
        if inner is not None and normed is None:
            behind = _norm_in_front(definition, body, inner.args[0], residual, before, total, self_name)
    use = _use(body, position, total, self_name)
    if use is not None and use.condition is not None and choice is not None:
        use = None
    if use is None and inner is None:
        return None
    scale = None
    for one, other in ((branch, residual), (residual, branch)):
        if inner is None and scale is None and (factors := _factors(one, self_name)) is not None:
            residual, (branch, scale) = other, factors
    calls = (None if use is None else use.call, inner, None if behind is None else behind[0])
    add = Add(*(None if call is None else called_norm(call) for call in calls))
    first = residual is value.right
    return PlacedAdd(add, body, statement, residual, branch, first, choice, normed, inner, behind, scale, use)


def norm_call(node: ast.AST | None, self_name: str) -> ast.Call | None:
    """``node`` where it is ``self.<name>(argument)`` or ``self.<name>[<number>](argument)``, else None."""
    if not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1 or isinstance(node.args[0], ast.Starred):
        return None
    held: ast.expr = node.func
    if isinstance(held, ast.Subscript) and isinstance(held.slice, ast.Constant) and type(held.slice.value) is int:
        held = held.value
    if not isinstance(held, ast.Attribute) or not _is_name(held.value, self_name):
        return None
    return node


def called_norm(call: ast.Call) -> str:
    """``<name>`` or ``<name>.<number>`` of such a call."""
    held = call.func
    if isinstance(held, ast.Subscript):
        assert isinstance(held.slice, ast.Constant)
        assert isinstance(held.value, ast.Attribute)
        return f"{held.value.attr}.{held.slice.value!r}"
    assert isinstance(held, ast.Attribute)
    return held.attr


def _inner_norm(
    definition: ast.FunctionDef,
    body: list[ast.stmt],
    operand: ast.expr,
    other: ast.expr,
    before: ast.stmt | None,
    total: str,
    self_name: str,
) -> tuple[ast.Call | None, ast.Assign | None]:
    """The call ``self.<inner>(argument)`` that makes an operand, and the statement before the add where it stands."""
    if isinstance(operand, ast.Name) and _assigns(before, operand.id):
        found = _norm_in_front(definition, body, operand, other, before, total, self_name)
        return (None, None) if found is None else found
    return norm_call(operand, self_name), None


def _norm_in_front(
    definition: ast.FunctionDef,
    body: list[ast.stmt],
    result: ast.expr,
    other: ast.expr,
    before: ast.stmt | None,
    total: str,
    self_name: str,
) -> tuple[ast.Call, ast.Assign] | None:
    """The call of a norm with whose ``result`` a sum is made, and which is all that the statement before it does."""
    if not isinstance(result, ast.Name) or not isinstance(before, ast.Assign) or not _assigns(before, result.id):
        return None
    if not isinstance(other, ast.Name) or other.id == result.id:  # it would see what was there before
        return None
    if result.id != total and not _is_read_last(definition, body, result):
        return None
    call = norm_call(before.value, self_name)
    return None if call is None else (call, before)


def _is_read_last(definition: ast.FunctionDef, body: list[ast.stmt], load: ast.Name) -> bool:
    """Return whether nothing reads a name after this load, in ``body``, or writes it."""
    for node in ast.walk(definition):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and node is not definition:
            return False  # it may read the name whenever it is called
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)) and any(inner is body for inner in bodies(node)):
            return False  # what stands before may come afterwards
    names = (node for node in ast.walk(definition) if isinstance(node, ast.Name) and node.id == load.id)
    return all((node.lineno, node.col_offset) <= (load.lineno, load.col_offset) for node in names)


def _factors(node: ast.expr, self_name: str) -> tuple[ast.expr, ast.expr] | None:
    """``(branch, self.<factor>)`` where ``node`` is their product."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        for branch, factor in ((node.left, node.right), (node.right, node.left)):
            if isinstance(factor, ast.Attribute) and _is_name(factor.value, self_name):
                return branch, factor
    return None


def _target(statement: ast.stmt) -> str | None:
    """``h`` of ``h = ...``; of ``return ...`` a name that no statement can have."""
    if isinstance(statement, ast.Return):
        return ""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        return target.id if isinstance(target, ast.Name) else None
    return None


def _is_add(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)


def _sum_first(choice: ast.IfExp) -> ast.IfExp:
    """``a + b if test else c``, also where it is written ``c if not test else a + b``."""
    if _is_add(choice.body):
        return choice
    return ast.IfExp(ast.UnaryOp(ast.Not(), choice.test), choice.orelse, choice.body)


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


def _use(body: list[ast.stmt], position: int, total: str, self_name: str) -> Use | None:
    """The call of a norm with ``total``, made by statement number ``position``, before anything but copies happens."""
    after = _after_copies(body, position + 1, total)
    if after is None:
        return None
    following = body[after]
    if not isinstance(following, ast.If):
        return _call_with(body, after, total, self_name)
    stored = {name.id for statement in body[position:after] for name in _names_stored(statement)}
    if not _is_plain_test(following.test) or mentions(following.test, *stored):
        return None
    for arm, condition in (
        (following.body, following.test),
        (following.orelse, ast.UnaryOp(ast.Not(), following.test)),
    ):
        first = _after_copies(arm, 0, total)
        use = None if first is None else _call_with(arm, first, total, self_name)
        if use is not None:
            use.condition = condition
            return use
    return None


def _after_copies(body: list[ast.stmt], position: int, total: str) -> int | None:
    while position < len(body) and _is_copy(body[position], unless_to=total):
        position += 1
    return position if position < len(body) else None


def _call_with(body: list[ast.stmt], position: int, total: str, self_name: str) -> Use | None:
    """``self.<norm>(total)``, where it is the first thing that a statement computes."""
    statement = body[position]
    if not isinstance(statement, (ast.Assign, ast.Return)) or statement.value is None:
        return None
    call = norm_call(next(_computed(statement.value), None), self_name)
    if call is None or not _is_name(call.args[0], total):
        return None
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if call is statement.value and not all(isinstance(target, ast.Name) for target in targets):
        return None
    return Use(body, statement, call, None)


def _computed(node: ast.AST) -> Iterator[ast.AST]:
    """What an expression computes, in the order of evaluation; not its names, attributes and constants."""
    match node:
        case ast.Name() | ast.Constant():
            return
        case ast.Attribute() | ast.Starred() | ast.keyword():
            yield from _computed(node.value)
        case ast.Subscript():
            yield from _computed(node.value)
            yield from _computed(node.slice)
        case ast.Call():
            for part in (node.func, *node.args, *node.keywords):
                yield from _computed(part)
            yield node
        case ast.BinOp():
            yield from _computed(node.left)
            yield from _computed(node.right)
            yield node
        case ast.Tuple() | ast.List():
            for part in node.elts:
                yield from _computed(part)
        case _:  # parts of it may never be evaluated
            yield node


def _is_plain_test(node: ast.expr) -> bool:
    """Return whether a test is of names and attributes, so that nothing happens where it is made twice."""
    match node:
        case ast.Name() | ast.Constant():
            return True
        case ast.Attribute():
            return _is_plain_test(node.value)
        case ast.UnaryOp(op=ast.Not()):
            return _is_plain_test(node.operand)
        case ast.BoolOp():
            return all(_is_plain_test(value) for value in node.values)
        case ast.Compare():
            plain = all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops)
            return plain and all(_is_plain_test(one) for one in (node.left, *node.comparators))
    return False


def _names_stored(statement: ast.stmt) -> Iterator[ast.Name]:
    return (node for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
