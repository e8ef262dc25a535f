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

Every name keeps its value, and everything else in the forward stays as upstream wrote it. ``inner`` is the norm of the
branch, ``dropout`` a dropout after it, and ``scale`` a factor of the branch that is an attribute of the layer, if there
are such. If no norm of the layer takes the sum, the normed branch is still fused with its add:

    hidden = self.fused_norm_then_add(self.inner, residual, hidden)

The norm may be called inside an expression, if nothing else is computed there before it:

    hidden = hidden + self.attention(self.norm1(hidden))
    hidden = hidden + self.mlp(self.norm2(hidden))

becomes

    y, hidden = self.fused_norm_add(self.norm2, hidden, self.attention(self.norm1(hidden)))
    hidden = hidden + self.mlp(y)

Operands are computed in their order: if the branch comes first, the keywords ``branch`` and ``residual`` keep it so. If
the add or the norm is conditional, the fused call is conditional too.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Any

from torch import nn

from ...kernels.norm import (
    ADD_RMS_NORM,
    ADD_RMS_NORM_FOR_CONSUMERS,
    NORM_ADD,
    NORM_ADD_NORM,
    NORM_ADD_NORM_FOR_CONSUMERS,
)
from ...spec import Kind
from ..block import Block, alike
from ..dataflow import Conditions, Dataflow, computed, computes_nothing, flow_of, may_hold, mentions
from ..fused_block import Rewrite, runtime
from ..fused_norm_module import norm_after_add, spec_and_weights, takes_residual, warn_once
from ..hooks import is_idle_dropout
from ..linear_inputs import ConsumerOutputs, consumer_spec
from ..patch_report import Site
from .calls import EditedForward, Match, Part, Patterns, call_of_own, callee_name, is_name
from .consumers import Consumer, consumer_of

_Y = "_fused_norm_y"


@dataclass(repr=False)
class NormCall(Part):
    """The call of a norm, or of a dropout, in a statement.

    Attributes:
        statement: the statement.
        call: the call.
        condition: the test of the ``if`` that contains the call and not the add, or None.
    """

    statement: ast.Assign | ast.Return
    call: ast.Call
    condition: ast.expr | None = None


@dataclass(repr=False)
class Add(Match):
    """One residual add.

    Attributes:
        statement: the statement of the add.
        residual, branch: its operands; the branch is the one with an inner norm or a factor, if there is one.
        branch_first: the branch is the first operand.
        choice: ``residual + branch if test else name``, or None.
        after: the call of the norm that takes the sum next, or None.
        inner: the norm whose result is added, in the add's statement or alone in the one before, or None.
        before: the norm before ``inner``, which may then be a dropout; or None.
        scale: the factor of the branch, or None.
        attributes: those of the module that are operands.
        consumer: the one module that reads the result of ``after``, or None.
        conditions: those on settings of the module under which the add is computed, and those of ``after``.

    The parts of a rewrite are ``norm``, ``inner``, ``dropout``, ``shared_inputs``, and ``called`` if other code sees
    the call of the norm.
    """

    pattern = "adds"

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

    @classmethod
    def find(cls, layer: Any, found: Patterns) -> list[Add]:
        """The adds that can be fused with a norm before or after them, in order."""
        flow = flow_of(layer)
        adds: list[Add] = []
        for statement in flow.body_of:
            add = _add_in(flow, statement, [add.after for add in adds if add.after is not None])
            adds += [] if add is None else [add]
        return adds

    @property
    def names(self) -> tuple[str | None, ...]:
        """The attributes of ``after``, ``inner`` and ``before``; ``norms.0`` for a norm in a list, None without one."""
        return tuple(None if norm is None else callee_name(norm.call) for norm in (self.after, self.inner, self.before))

    def norm_calls(self, parts: Sequence[str]) -> list[ast.Call]:
        """See ``Match``."""
        norms = {"norm": self.after, "inner": self.inner, "dropout": self.before}
        return [norm.call for part, norm in norms.items() if part in parts and norm is not None]

    def bypassed(self, parts: Sequence[str]) -> list[str]:
        """See ``Match``."""
        norm, inner, before = self.names
        named = ("norm", norm), ("inner", before if "dropout" in parts else inner)
        return [name for part, name in named if part in parts and name is not None]

    def fused_sites(self, parts: Sequence[str]) -> Iterator[tuple[Kind | None, str]]:
        """See ``Match``."""
        norm, inner, before = self.names
        if "norm" in parts and norm is not None:
            yield "residual", norm
        if "inner" in parts:
            yield "post_norm", (before if "dropout" in parts else inner) or ""

    def decide(self, block: Block, index: int, found: Patterns) -> Iterator[Site]:
        """The rows of the add with the norm after it, and with the norm of its branch.

        There are none if it adds a number, and none of what the module's settings never run.
        """
        if any(isinstance(block.member(name), (int, float)) for name in self.attributes):
            return
        norm, inner, before = self.names
        dropout = before is not None and isinstance(block.member(inner or ""), nn.Dropout)
        name, part = (before, ("inner", "dropout")) if dropout else (inner, ("inner",))
        parts: tuple[str, ...] = ()
        after = None
        if norm is not None and block.holds_norm(norm):
            after = block.norm_row(norm, "residual")
            parts += ("norm",) if after.reason is None else ()
            if all(may_hold(conditions, block.module) for conditions in self.conditions):
                yield after
            if self.consumer is not None and after.reason is None and self.consumer.decide(block):
                parts += ("shared_inputs",)
        if name is not None and block.holds_norm(name):
            row = block.norm_row(name, "post_norm")
            if after is not None and after.reason is None and not alike(row, after):
                row = row.skipped("it differs from the norm after the add in more than the weight")
            parts += part if row.reason is None else ()
            if may_hold(self.conditions[0], block.module):
                yield row
        if parts:
            what = "+".join([*(["norm"] if "inner" in parts else []), "add", *(["norm"] if "norm" in parts else [])])
            block.rewrites.append(Rewrite("adds", index, parts, what=what))

    def edit(self, rewrite: Rewrite, forward: EditedForward) -> None:
        """Replace the add, and the norms in these parts, by the fused call."""
        branch, inner, named = self.branch, {}, {}
        stock: ast.expr | None = self.statement.value
        if "inner" in rewrite.parts and self.inner is not None:
            norm = self.inner
            if "dropout" in rewrite.parts and self.before is not None:
                inner["dropout"] = norm.call.func
                norm = self.before
            branch = norm.call.args[0]
            named = {"inner": norm.call.func, **inner}
            if norm.statement is not self.statement:
                forward.remove(norm.statement)
            stock = self._call(forward, "fused_norm_then_add", norm.call.func, branch, inner)
        assert stock is not None
        if "norm" not in rewrite.parts or self.after is None or isinstance(self.statement, ast.Return):
            self.statement.value = stock
            return
        if self.scale is not None:
            named["scale"] = self.scale
        if "shared_inputs" in rewrite.parts and self.consumer is not None:
            named["consumer"] = copy.deepcopy(self.consumer.module)
        after, y = self.after, f"{_Y}{rewrite.index}"
        method = "fused_norm_add_by_call" if "called" in rewrite.parts else "fused_norm_add"
        fused = self._call(forward, method, after.call.func, branch, named)
        if self.choice is not None:
            nodes = {"TEST": self.choice.test, "NORM": copy.deepcopy(after.call.func), "NAME": self.choice.orelse}
            fused = forward.code("FUSED if TEST else (NORM(NAME), NAME)", FUSED=fused, **nodes)
        elif after.condition is not None:
            # Not a copy of the sum: a later rewrite of what is in it has to change both.
            test = copy.deepcopy(after.condition)
            fused = forward.code("FUSED if TEST else (None, STOCK)", FUSED=fused, TEST=test, STOCK=stock)
        self.statement.targets = [ast.Tuple([ast.Name(y, ast.Store()), self.statement.targets[0]], ast.Store())]
        self.statement.value = fused
        forward.replace(after.call, ast.Name(y, ast.Load()))
        if isinstance(after.statement, ast.Assign):  # the name must not keep y alive longer than stock would
            forward.insert_after(after.statement, forward.code(f"del {y}"))

    def _call(
        self, forward: EditedForward, method: str, norm: ast.expr, branch: ast.expr, named: Mapping[str, ast.expr]
    ) -> Any:
        """``self.<method>(norm, residual, branch)``, with both in their order: each may draw random numbers."""
        operands = "branch=BRANCH, residual=RESIDUAL" if self.branch_first else "RESIDUAL, BRANCH"
        source = f"self.{method}(NORM, {operands}{''.join(f', {name}={name.upper()}' for name in named)})"
        nodes = {name.upper(): node for name, node in named.items()}
        return forward.code(source, NORM=norm, RESIDUAL=self.residual, BRANCH=branch, **nodes)


def _add_in(flow: Dataflow, statement: ast.stmt, taken: list[NormCall]) -> Add | None:
    """The add in a statement. Its inner norm is not ``taken`` by a sum before it."""
    match statement:
        case ast.Return(value):
            total = ""  # a name that no statement can have
        case ast.Assign([ast.Name(total)], value):
            pass
        case _:
            return None
    choice = None
    match value:
        case ast.IfExp(_, ast.BinOp(op=ast.Add()), ast.Name()) if total:
            choice = value
        case ast.IfExp(test, ast.Name() as name, ast.BinOp(op=ast.Add()) as added) if total:
            choice = ast.IfExp(ast.UnaryOp(ast.Not(), test), added, name)
    value = value if choice is None else choice.body
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
        return None
    residual, branch = value.left, value.right
    attributes = tuple(operand.attr for operand in (residual, branch) if flow.is_own(operand))
    if any(norm.call in (residual, branch) for norm in taken) or any(map(flow.is_number, (residual, branch))):
        return None
    inner = before = None
    if choice is None:
        previous = next((earlier for earlier, later in pairwise(flow.body_of[statement]) if later is statement), None)
        if any(previous is norm.statement for norm in taken):
            previous = None
        for operand, other in ((branch, residual), (residual, branch)):
            call = call_of_own(operand, flow.own)
            inner = NormCall(statement, call) if call else _norm_before(flow, operand, other, previous, total)
            if inner is not None:
                residual, branch = other, operand
                break
        if inner is not None and residual is value.right and flow.may_change(inner.call.args[0], [residual]):
            inner = None
        if inner is not None and inner.statement is statement:
            before = _norm_before(flow, inner.call.args[0], residual, previous, total)
    stored = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    after = _norm_after(flow.after(statement), total, flow.own, stored)
    if after is not None and after.condition is not None and choice is not None:
        after = None
    if after is None and inner is None:
        return None
    scale = None
    if inner is None:
        products = (
            (other, scaled, factor)
            for operand, other in ((branch, residual), (residual, branch))
            if isinstance(operand, ast.BinOp) and isinstance(operand.op, ast.Mult)
            for scaled, factor in permutations((operand.left, operand.right))
            if flow.is_own(factor)
        )
        residual, branch, scale = next(products, (residual, branch, None))
    consumer = None if after is None else consumer_of(flow, after.call)
    conditions = flow.conditions(value), () if after is None else flow.conditions(after.call)
    operands = residual, branch, residual is value.right
    return Add(statement, *operands, choice, after, inner, before, scale, attributes, consumer, conditions)


def _norm_before(
    flow: Dataflow, result: ast.expr, other: ast.expr, previous: ast.stmt | None, total: str
) -> NormCall | None:
    """The call of a norm that gives ``result``, an operand of a sum, and is all that the ``previous`` statement does.

    ``other``: the other operand, which must not see what the name held before.
    """
    definition = flow.definition_of(result)
    if definition is None or definition.statement is not previous or not isinstance(previous, ast.Assign):
        return None
    if len(previous.targets) != 1 or not isinstance(other, ast.Name) or other.id == definition.name:
        return None
    if definition.name != total and not flow.is_read_only_in(definition, result):
        return None
    call = call_of_own(definition.value, flow.own)
    return None if call is None else NormCall(previous, call)


def _norm_after(
    statements: list[ast.stmt], total: str, own: str, stored: set[str], condition: ast.expr | None = None
) -> NormCall | None:
    """The call of a norm that takes ``total`` before these statements compute anything else; they may copy names.

    It may be in an ``if``, whose test becomes its condition, if that reads no name that was ``stored`` by then.
    """
    for statement in statements:
        match statement:
            case ast.Assign(targets, ast.Name()) if all(isinstance(to, ast.Name) and to.id != total for to in targets):
                stored.update(target.id for target in targets if isinstance(target, ast.Name))
                continue
            case ast.If(test, body, other) if (
                condition is None and computes_nothing(test) and not mentions(test, *stored)
            ):
                negated = ast.UnaryOp(ast.Not(), test)
                return _norm_after(body, total, own, stored, test) or _norm_after(other, total, own, stored, negated)
            case ast.Assign(targets, ast.expr() as value):
                pass
            case ast.Return(ast.expr() as value):
                targets = []
            case _:
                return None
        call = call_of_own(next(computed(value), None), own)
        if call is None or not is_name(call.args[0], total):
            return None
        if call is value and not all(isinstance(target, ast.Name) for target in targets):
            return None
        return NormCall(statement, call, condition)
    return None


@runtime
def fused_norm_add(
    self: Any,
    norm: Any,
    residual: Any,
    branch: Any,
    *,
    inner: Any = None,
    dropout: Any = None,
    scale: Any = 1.0,
    consumer: Any = None,
) -> tuple[Any, Any]:
    """``(norm(s), s)`` of ``s = residual + scale * dropout(inner(branch))``; ``consumer`` gets the norm."""
    if dropout is not None and _drops(self, dropout):
        branch, inner = dropout(inner(branch)), None
    if inner is not None:
        spec, *weights = spec_and_weights(inner, norm)
        tensors = branch, residual, *weights
        consumers = None if spec is None or consumer is None else consumer_spec(consumer, *tensors)
        if consumers is not None:
            outputs, reason = NORM_ADD_NORM_FOR_CONSUMERS.try_fused(*tensors, spec, *consumers)
            if reason is None:
                *ys, s = outputs
                return ConsumerOutputs(ys, consumers, norm, s), s
        outputs = None if spec is None else NORM_ADD_NORM.try_fused(*tensors, spec)[0]
        if outputs is not None:
            return outputs
        branch = inner(branch)
    if type(scale) not in (float, int):
        branch, scale = branch * scale, 1.0
    spec, weight = spec_and_weights(norm)
    consumers = None if consumer is None else consumer_spec(consumer, branch, residual, weight)
    if consumers is None:
        outputs, reason = ADD_RMS_NORM.try_fused(branch, residual, weight, spec, None, scale)
        return outputs if reason is None else norm_after_add(norm, branch, residual, scale, reason)
    outputs, reason = ADD_RMS_NORM_FOR_CONSUMERS.try_fused(branch, residual, weight, spec, scale, *consumers)
    if reason is not None:
        return norm_after_add(norm, branch, residual, scale, reason)
    *tensors, s = outputs
    return ConsumerOutputs(tensors, consumers, norm, s), s


def _drops(self: Any, dropout: Any) -> bool:
    """Return whether a dropout has to be called; the log says so once."""
    if is_idle_dropout(dropout):
        return False
    reason = "a dropout between them is active, or other code sees its call"
    warn_once(self.fused_norm_origin, reason, "a norm and its add one by one")
    return True


@runtime
def fused_norm_add_by_call(self: Any, norm: Any, residual: Any, branch: Any, *, scale: Any = 1.0) -> tuple[Any, Any]:
    """``(norm(s), s)`` of ``s = residual + scale * branch``, by a call of the norm, with the residual if it may."""
    if type(scale) not in (float, int):
        branch, scale = branch * scale, 1.0
    if takes_residual(norm):
        return norm(branch, residual) if scale == 1.0 else norm(branch, residual, scale)
    total = residual + (branch if scale == 1.0 else branch * scale)
    return norm(total), total


@runtime
def fused_norm_then_add(self: Any, inner: Any, residual: Any, branch: Any, *, dropout: Any = None) -> Any:
    """``residual + dropout(inner(branch))``."""
    if dropout is not None and _drops(self, dropout):
        return residual + dropout(inner(branch))
    spec, weight = spec_and_weights(inner)
    outputs, reason = NORM_ADD.try_fused(branch, residual, weight, spec)
    return outputs if reason is None else residual + inner(branch)
