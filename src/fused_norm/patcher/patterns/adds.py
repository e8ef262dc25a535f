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

    hidden = self.fused_norm_then_add(self.inner, residual, hidden)

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
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import shorten

from torch import nn

from ..block import Block, alike
from ..dataflow import Conditions, Dataflow, come_out_so, computed, computes_nothing, mentions
from ..patch_report import Site
from ..rewrite import Rewrite
from ..source import global_of, returns_sum
from .calls import Called, EditedForward, Match, Missed, call_of_own, called, is_name, make_call, operands_of
from .consumers import Consumer, consumer_of

_Y = "_fused_norm_y"

_SAME_TENSOR = ("contiguous", "float", "to", "type", "type_as")
"""Methods that may return the tensor that they are called on."""

_ADD = ("add", "add_")
"""Methods and functions of PyTorch that add."""


@dataclass
class NormCall:
    """The call of a norm, or of a dropout: ``call`` in ``statement``.

    Attributes:
        condition: the test of the ``if`` that the call is in, and the add is not; None where there is none.
    """

    statement: ast.Assign | ast.Return
    call: ast.Call
    condition: ast.expr | None = None


@dataclass
class Add(Match):
    """One residual add, in ``statement``.

    Attributes:
        residual, branch: its operands; the branch is the one with an inner norm or a factor, if there is one.
        branch_first: the branch is the first operand.
        choice: ``residual + branch if test else name``, None where the add is not part of such an expression.
        after: the call of the norm that takes the sum next, None where none does.
        inner: the norm whose result is added, in the add's statement or in one before that does nothing else; None
            where something else is added.
        before: the norm in front of ``inner``, which may be a dropout; None where there is none.
        scale: the factor of the branch.
        attributes: those of the module that are operands.
        consumer: what reads the result of ``after``; None where that is not one module.
        conditions: those under which the add is computed, and those of ``after``, as far as settings of the module
            decide them.
    """

    statement: ast.Assign | ast.Return
    residual: ast.expr
    branch: ast.expr
    branch_first: bool
    choice: ast.IfExp | None
    after: NormCall | None
    inner: NormCall | None
    before: NormCall | None
    scale: ast.expr | None
    attributes: tuple[str, ...]
    consumer: Consumer | None
    conditions: tuple[Conditions, Conditions]

    @property
    def names(self) -> tuple[str | None, ...]:
        """The attributes of ``after``, ``inner`` and ``before``; ``norms.0`` for a norm in a list, None without one."""
        return tuple(None if one is None else called(one.call) for one in (self.after, self.inner, self.before))

    def calls(self, parts: Sequence[str]) -> list[ast.Call]:
        """The calls of norms, and of a dropout, that are in these parts of a rewrite."""
        inner = (self.inner, self.before) if "dropout" in parts else (self.inner,)
        found = [*([self.after] if "norm" in parts else ()), *(inner if "inner" in parts else ())]
        return [one.call for one in found if one is not None]

    def bypassed(self, parts: Sequence[str]) -> list[tuple[str, str]]:
        """See ``Match``."""
        norm, inner, before = self.names
        read = None if self.consumer is None else self.consumer.module.attr
        named = ("norm", norm), ("inner", before if "dropout" in parts else inner), ("consumers", read)
        return [(part, name) for part, name in named if part in parts and name is not None]

    def decide(self, block: Block, index: int) -> Iterator[Site]:
        """The rows of the add: with the norm after it, and with the norm of its branch.

        There are none where it adds a number, and none of what the module's settings never run.
        """
        if _adds_number(self.attributes, block):
            return
        done = block.applied_parts("adds", index) or ()
        norm, inner, before = self.names
        dropout = before is not None and isinstance(block.member(inner or ""), nn.Dropout)
        name, part = (before, ("inner", "dropout")) if dropout else (inner, ("inner",))
        parts: tuple[str, ...] = ()
        after = None
        if norm is not None and block.holds_norm(norm):
            after = block.norm_row(norm, "residual", "norm" in done)
            parts += ("norm",) if after.reason is None else ()
            if all(come_out_so(one, block.module) for one in self.conditions):
                yield after
            if self.consumer is not None and after.reason is None and self.consumer.decide(block):
                parts += ("consumers",)
        if name is not None and block.holds_norm(name):
            row = block.norm_row(name, "sandwich", "inner" in done)
            if after is not None and after.reason is None and not alike(row, after):
                row = row.skipped("it differs from the norm after the add in more than the weight")
            parts += part if row.reason is None else ()
            if come_out_so(self.conditions[0], block.module):
                yield row
        if parts:
            block.rewrites.append(Rewrite("adds", index, parts))

    def edit(self, rewrite: Rewrite, forward: EditedForward) -> None:
        """Put the fused call in the add's place."""
        branch, keywords, dropout, own = self.branch, [], [], forward.own
        stock = self.statement.value
        assert stock is not None
        if "inner" in rewrite.parts and self.inner is not None:
            norm = self.inner
            if "dropout" in rewrite.parts and self.before is not None:
                dropout.append(ast.keyword("dropout", norm.call.func))
                norm = self.before
            branch = norm.call.args[0]
            keywords += [ast.keyword("inner", norm.call.func), *dropout]
            if norm.statement is not self.statement:
                forward.remove(norm.statement)
            stock = self._call(own, "fused_norm_then_add", norm.call.func, branch, dropout)
        if "norm" not in rewrite.parts or self.after is None or isinstance(self.statement, ast.Return):
            self.statement.value = stock
            return
        if self.scale is not None:
            keywords.append(ast.keyword("scale", self.scale))
        if "consumers" in rewrite.parts and self.consumer is not None:
            keywords.append(ast.keyword("consumer", copy.deepcopy(self.consumer.module)))
        after, y = self.after, f"{_Y}{rewrite.index}"
        method = "fused_norm_add_by_call" if "called" in rewrite.parts else "fused_norm_add"
        fused: ast.expr = self._call(own, method, after.call.func, branch, keywords)
        if self.choice is not None:
            name = self.choice.orelse
            without = ast.Tuple([ast.Call(copy.deepcopy(after.call.func), [name], []), copy.deepcopy(name)], ast.Load())
            fused = ast.IfExp(self.choice.test, fused, without)
        elif after.condition is not None:
            # Not a copy of the sum: a later rewrite of what is in it has to change both.
            without = ast.Tuple([ast.Constant(None), stock], ast.Load())
            fused = ast.IfExp(copy.deepcopy(after.condition), fused, without)
        self.statement.targets = [ast.Tuple([ast.Name(y, ast.Store()), self.statement.targets[0]], ast.Store())]
        self.statement.value = fused
        forward.replace(after.call, ast.Name(y, ast.Load()))
        if isinstance(after.statement, ast.Assign):  # the name must not keep y alive longer than stock would
            forward.insert_after(after.statement, ast.Delete([ast.Name(y, ast.Del())]))

    def _call(self, own: str, method: str, norm: ast.expr, branch: ast.expr, keywords: list[ast.keyword]) -> ast.Call:
        """``self.<method>(norm, residual, branch)``; both are computed in their order: dropout, say, draws by turns."""
        if not self.branch_first:
            return make_call(own, method, [norm, self.residual, branch], keywords)
        operands = [ast.keyword("branch", branch), ast.keyword("residual", self.residual)]
        return make_call(own, method, [norm], [*operands, *keywords])


def decide_missed_add(missed: Missed, block: Block) -> Iterator[Site]:
    """The rows of an add that reaches a norm in another way than is fused; none where it never does."""
    norms = [norm for norm in _named(missed.called.name, block) if block.holds_norm(norm)]
    if not come_out_so(missed.conditions, block.module) or _adds_number(missed.attributes, block):
        return
    if missed.function is not None and norms and not returns_sum(global_of(block.origin, missed.function)):
        return
    for norm in norms:
        row = block.norm_row(norm, "residual", already=False)
        yield row.skipped(f"its sum, {shorten(missed.source, 80)}, reaches it in a way that is not rewritten")


def _named(norm: str, block: Block) -> list[str]:
    """The norms that the name in a ``Missed`` may mean."""
    held, _, number = norm.partition(".")
    if number != "*" and not number.startswith("-"):
        return [norm]
    all_of_them = [f"{held}.{name}" for name in getattr(block.member(held), "_modules", ())]
    return all_of_them if number == "*" else all_of_them[int(number) :][:1]


def _adds_number(attributes: tuple[str, ...], block: Block) -> bool:
    return any(isinstance(block.member(name), (int, float)) for name in attributes)


def find_adds(flow: Dataflow) -> list[Add]:
    """The adds that can be fused with a norm before or after them, in order."""
    found: list[Add] = []
    for body in flow.bodies:
        for position in range(len(body)):
            taken = [one.after for one in found if one.after is not None]
            add = _add_at(flow, body, position, taken)
            if add is not None:
                found.append(add)
    return found


def find_missed_adds(flow: Dataflow, adds: list[Add]) -> list[Missed]:
    """The adds that reach a norm and are not fused with it where all of ``adds`` are fused, each one once."""
    fused = {one.after.call: set(ast.walk(one.statement)) for one in adds if one.after is not None}
    missed = []
    for call in flow.calls:
        norm, argument = _norm_called(flow, call)
        if norm is None:
            continue
        for one in flow.origins(argument, _SAME_TENSOR):
            operands, function = _summed(one, flow)
            if operands and one not in fused.get(call, ()) and not any(map(flow.is_number, operands)):
                attributes = _attributes(flow, *operands)
                conditions = flow.conditions(one, call)
                missed.append(Missed(ast.unparse(one), Called(norm), conditions, function, attributes))
    return list(dict.fromkeys(missed))


def _attributes(flow: Dataflow, *operands: ast.expr) -> tuple[str, ...]:
    """The attributes of the module among operands."""
    return tuple(one.attr for one in operands if flow.is_own(one))


def _summed(node: ast.AST, flow: Dataflow) -> tuple[Sequence[ast.expr], str | None]:
    """The operands of an add; for the call of a function that may add that call, and the function's name."""
    match node:
        case ast.Call(ast.Name("sum"), [ast.Tuple() | ast.List()]):
            return [node], None
        case ast.Call(ast.Name(function)):
            return [node], function
    return operands_of(node, ast.Add, _ADD, flow), None


def _norm_called(flow: Dataflow, call: ast.Call) -> tuple[str | None, ast.expr | None]:
    """The attribute of the module that a call of one tensor is of, and the tensor; None where it is another call."""
    given = [*call.args, *(one.value for one in call.keywords)]
    if len(given) != 1 or isinstance(given[0], ast.Starred):
        return None, None
    if call_of_own(call, flow.own) is not None:
        return called(call), given[0]
    if flow.is_own(call.func):
        return call.func.attr, given[0]
    if isinstance(call.func, ast.Subscript) and flow.is_own(call.func.value):
        number = ast.unparse(call.func.slice)
        return f"{call.func.value.attr}.{number if re.fullmatch(r'-[0-9]+', number) else '*'}", given[0]
    return None, None


def _add_at(flow: Dataflow, body: list[ast.stmt], position: int, taken: list[NormCall]) -> Add | None:
    """The add in statement number ``position``. Its inner norm is none that is ``taken`` by a sum before it."""
    statement = body[position]
    total, choice = _target(statement), None
    if total is None or not isinstance(statement, (ast.Assign, ast.Return)):
        return None
    value = statement.value
    if isinstance(value, ast.IfExp) and isinstance(statement, ast.Assign):
        choice = _sum_first(value)
        value = choice.body
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
        return None
    if choice is not None and not isinstance(choice.orelse, ast.Name):
        return None
    residual, branch = value.left, value.right
    attributes = _attributes(flow, residual, branch)
    if any(use.call in (residual, branch) for use in taken) or any(map(flow.is_number, (residual, branch))):
        return None
    inner = behind = None
    if choice is None:
        previous = body[position - 1] if position else None
        if any(previous is use.statement for use in taken):
            previous = None
        for one, other in ((branch, residual), (residual, branch)):
            call = call_of_own(one, flow.own)
            inner = NormCall(statement, call) if call else _norm_in_front(flow, one, other, previous, total)
            if inner is not None:
                residual, branch = other, one
                break
        if inner is not None and residual is value.right and flow.may_change(inner.call.args[0], [residual]):
            inner = None
        if inner is not None and inner.statement is statement:
            behind = _norm_in_front(flow, inner.call.args[0], residual, previous, total)
    after = _norm_after(body, position, total, flow.own)
    if after is not None and after.condition is not None and choice is not None:
        after = None
    if after is None and inner is None:
        return None
    scale = None
    for one, other in ((branch, residual), (residual, branch)):
        if inner is None and scale is None and (factors := _factors(one, flow)) is not None:
            residual, (branch, scale) = other, factors
    first = residual is value.right
    consumer = None if after is None else consumer_of(flow, after.call)
    conditions = flow.conditions(value), () if after is None else flow.conditions(after.call)
    return Add(
        statement, residual, branch, first, choice, after, inner, behind, scale, attributes, consumer, conditions
    )


def _norm_in_front(
    flow: Dataflow, result: ast.expr, other: ast.expr, previous: ast.stmt | None, total: str
) -> NormCall | None:
    """The call of a norm with whose ``result`` a sum is made, and which is all that the statement before it does.

    ``other``: the other operand, which would see what the name held before.
    """
    definition = flow.definition_of(result)
    if definition is None or definition.statement is not previous or not isinstance(previous, ast.Assign):
        return None
    if len(previous.targets) != 1 or not isinstance(other, ast.Name) or other.id == definition.name:
        return None
    if definition.name != total and not flow.is_read_by_alone(definition, result):
        return None
    call = call_of_own(definition.value, flow.own)
    return None if call is None else NormCall(previous, call)


def _factors(node: ast.expr, flow: Dataflow) -> tuple[ast.expr, ast.expr] | None:
    """``(branch, self.<factor>)`` where ``node`` is their product."""
    factors = operands_of(node, ast.Mult, (), flow)
    return next(((one, other) for one, other in zip(factors, factors[::-1], strict=True) if flow.is_own(other)), None)


def _target(statement: ast.stmt) -> str | None:
    """``h`` of ``h = ...``; of ``return ...`` a name that no statement can have."""
    match statement:
        case ast.Return():
            return ""
        case ast.Assign(targets=[ast.Name(name)]):
            return name
    return None


def _sum_first(choice: ast.IfExp) -> ast.IfExp:
    """``a + b if test else c``, also where it is written ``c if not test else a + b``."""
    if isinstance(choice.body, ast.BinOp) and isinstance(choice.body.op, ast.Add):
        return choice
    return ast.IfExp(ast.UnaryOp(ast.Not(), choice.test), choice.orelse, choice.body)


def _norm_after(body: list[ast.stmt], position: int, total: str, own: str) -> NormCall | None:
    """The call of a norm with the sum of statement number ``position``, before anything but copies happens."""
    after = _after_copies(body, position + 1, total)
    if after is None:
        return None
    following = body[after]
    if not isinstance(following, ast.If):
        return _norm_first(body, after, total, own)
    between = [node for statement in body[position:after] for node in ast.walk(statement)]
    stored = {node.id for node in between if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if not computes_nothing(following.test) or mentions(following.test, *stored):
        return None
    for arm, condition in (
        (following.body, following.test),
        (following.orelse, ast.UnaryOp(ast.Not(), following.test)),
    ):
        first = _after_copies(arm, 0, total)
        use = None if first is None else _norm_first(arm, first, total, own)
        if use is not None:
            use.condition = condition
            return use
    return None


def _after_copies(body: list[ast.stmt], position: int, total: str) -> int | None:
    """The number of the first statement from ``position`` on that is no copy between names, ``total`` not a target."""
    for number, statement in enumerate(body[position:], position):
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Name):
            return number
        if not all(isinstance(target, ast.Name) and target.id != total for target in statement.targets):
            return number
    return None


def _norm_first(body: list[ast.stmt], position: int, total: str, own: str) -> NormCall | None:
    """``self.<norm>(total)``, where it is the first thing that a statement computes."""
    statement = body[position]
    if not isinstance(statement, (ast.Assign, ast.Return)) or statement.value is None:
        return None
    call = call_of_own(next(computed(statement.value), None), own)
    if call is None or not is_name(call.args[0], total):
        return None
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if call is statement.value and not all(isinstance(target, ast.Name) for target in targets):
        return None
    return NormCall(statement, call)
