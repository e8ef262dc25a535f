"""The product of a gated MLP: found in its source, and replaced by a call that computes it with the activation.

In the forward of an MLP,

    return self.down(self.act(self.gate(x)) * self.up(x))

becomes, whatever the names are,

    return self.down(self.fused_norm_gate("silu", self.act, gate=self.gate(x), up=self.up(x)))

The activation may be a function such as ``F.silu``, and may be called in a statement before the product.
Halves of one tensor stay together:

    gate, up = self.gate_up(x).chunk(2, dim=-1)
    hidden = up * self.act(gate)

becomes

    packed = self.gate_up(x)
    hidden = self.fused_norm_gate_packed("silu", self.act, packed)

If ``down`` is a LoRA layer around a 4-bit linear, which casts the product, it is called with what that layer reads:

    return self.fused_norm_gated("silu", self.act, self.down, gate=(self.gate, x), up=(self.up, x))
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations
from textwrap import shorten
from typing import Any, cast

from torch import nn

from ..activation_recognition import looks_like_activation, recognise_activation
from ..adapters import is_quantised
from ..block import Block
from ..dataflow import Conditions, Dataflow, edits_in_place, may_hold
from ..fused_block import Rewrite
from ..hooks import are_plain_calls
from ..patch_report import Site
from ..probe import UnrecognisedError
from .calls import Callee, EditedForward, Match, Missed, call_of_own, callee_name, operands_of

ACTIVATION_FUNCTION = re.compile(r"silu|swish|gelu")
"""Part of the names of functions that may be activations."""

SIGMOID = "sigmoid"
"""The function in activations that are written out: ``x * torch.sigmoid(a * x)``."""

_PACKED = "_fused_norm_packed"

_MULTIPLY = ("mul", "mul_", "multiply")
"""Methods and functions of PyTorch that multiply."""

_LATER = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp, ast.BoolOp)
"""Expressions whose parts may be computed several times, or never."""


@dataclass(repr=False)
class Gate(Match):
    """A product of something with what may be an activation.

    Attributes:
        act: what is called for one factor.
        product: the product. If both factors are calls of attributes, it is the product of two gates.
        factor: the factor that is the activation's result.
        call: the call of the activation.
        linear: the call of a module of its own, whose result alone the activation is given; or None.
        halves: the statement that cuts one tensor into gate and up, or None.
        conditions: those on settings of the module under which the product is computed.
        consumer: the call of a module of its own, ``self.<name>(product)``, that alone reads the product; or None.
    """

    act: Callee
    product: ast.BinOp
    factor: ast.expr
    call: ast.Call
    linear: ast.Call | None
    halves: ast.Assign | None
    conditions: Conditions
    consumer: ast.Call | None

    def bypassed(self, parts: Sequence[str]) -> list[str]:
        """See ``Match``."""
        return [self.act.name]

    def edit(self, rewrite: Rewrite, forward: EditedForward) -> None:
        """Replace the product by the fused call."""
        assert rewrite.activation is not None
        formula, left, right = rewrite.activation.formula, self.product.left, self.product.right
        if self.halves is not None:
            packed, chunk = f"{_PACKED}{rewrite.index}", cast(Any, self.halves.value)
            self.halves.targets, self.halves.value = [ast.Name(packed, ast.Store())], chunk.func.value
            fused = forward.code(f"self.fused_norm_gate_packed({formula!r}, ACT, {packed})", ACT=self.call.func)
            forward.replace(self.product, fused)
            forward.replace(self.call, self.call.args[0])
            return
        factors = "gate=LEFT, up=RIGHT" if self.factor is left else "up=LEFT, gate=RIGHT"
        nodes = {"ACT": self.call.func, "LEFT": left, "RIGHT": right}
        if self.consumer is None or "consumer" not in rewrite.parts:
            forward.replace(self.product, forward.code(f"self.fused_norm_gate({formula!r}, ACT, {factors})", **nodes))
            forward.replace(self.call, self.call.args[0])
            return
        source = f"self.fused_norm_gated({formula!r}, ACT, CONSUMER, {factors})"
        fused = forward.code(source, CONSUMER=self.consumer.func, **nodes)
        forward.replace(self.consumer, fused)
        forward.replace(self.call, self.call.args[0])
        for factor in fused.keywords:
            linear = call_of_own(factor.value, forward.own)
            if linear is not None:
                factor.value = ast.Tuple([linear.func, *linear.args], ast.Load())


def decide_gates(gates: Sequence[Gate], missed: Sequence[Missed], block: Block) -> Iterator[Site]:
    """The rows of products with an activation as a factor, except those that the module's settings never compute."""
    rows: dict[ast.BinOp, Site] = {}
    for index, gate in enumerate(gates):
        earlier = rows.get(gate.product)
        if earlier is not None and earlier.activation is not None:
            continue
        row, act = block.own_row("mlp", block.applied_parts("gates", index) is not None), gate.act.resolve(block)
        if isinstance(act, nn.Module) and not are_plain_calls(act):
            row = row.skipped("hooks or other code stand on its activation", "overridden")
        try:
            activation = recognise_activation(act)
        except UnrecognisedError as error:  # code that hooks it may also put attributes on it, as ZeRO-3 does
            if earlier is None and looks_like_activation(gate.act.name, act):
                rows[gate.product] = row.skipped(str(error))
            continue
        rows[gate.product] = row = dataclasses.replace(row, activation=activation.formula)
        linear = gate.linear and block.member(callee_name(gate.linear))
        if getattr(linear, "out_features", None) == 1:  # such as that of a shared expert
            rows[gate.product] = row = row.skipped("its gate is one number for each row, which broadcasts")
        if row.reason is None:
            consumer: Any = gate.consumer and block.member(callee_name(gate.consumer))
            parts = ("consumer",) if gate.halves is None and is_quantised(consumer) else ()
            block.rewrites.append(Rewrite("gates", index, parts, activation))
    reached = {gate.product for gate in gates if may_hold(gate.conditions, block.module)}
    yield from (row for product, row in rows.items() if product in reached)
    yield from decide_missed_gates(missed, block, block.origin, "is written in a way that is not rewritten")


def decide_missed_gates(missed: Sequence[Missed], block: Block, function: Any, reason: str) -> Iterator[Site]:
    """The rows of products in a ``function``, or in the forward of a class, that are not fused for a ``reason``."""
    for product in missed:
        if not may_hold(product.conditions, block.module):
            continue
        row = block.own_row("mlp", already=False)
        if product.callee.is_written_out:
            yield row.skipped(f"its activation, {shorten(product.callee.name, 80)}, is written out")
            continue
        with suppress(UnrecognisedError):
            activation = recognise_activation(product.callee.resolve(block, function))
            reason_with_source = f"its product, {shorten(product.source, 80)}, {reason}"
            row = dataclasses.replace(row, activation=activation.formula)
            yield row.skipped(reason_with_source, in_helper=function is not block.origin)


def find_gates(flow: Dataflow) -> list[Gate]:
    """The products of something with what may be an activation."""
    return [
        gate
        for statement in flow.body_of
        for product in _products(statement)
        for factor, other in permutations((product.left, product.right))
        if not _only_scales(other, flow)
        if (gate := _gate(flow, statement, product, factor, other)) is not None
    ]


def find_missed_gates(flow: Dataflow, gates: list[Gate]) -> list[Missed]:
    """The other products of something with what may be an activation, each once."""
    fused = {(gate.product, gate.factor) for gate in gates}
    missed = [
        Missed(ast.unparse(node), act, flow.conditions(node, call))
        for node in ast.walk(flow.definition)
        for factor, other in permutations(operands_of(node, ast.Mult, _MULTIPLY, flow), 2)
        if (node, factor) not in fused and not _only_scales(other, flow)
        for call in flow.origins(factor)
        if (act := activation_of(call, flow) or _written_out(call)) is not None
    ]
    return list(dict.fromkeys(missed))


def _products(statement: ast.stmt) -> Iterator[ast.BinOp]:
    """The products that a statement computes exactly once whenever it is reached."""
    is_simple = isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr))
    nodes: list[ast.AST] = [statement] if is_simple else []
    while nodes:
        node = nodes.pop()
        if not isinstance(node, _LATER):
            nodes += ast.iter_child_nodes(node)
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                yield node


def _only_scales(factor: ast.expr, flow: Dataflow) -> bool:
    """Return whether a factor is a number, an attribute of the module, which scales, or a mask, which broadcasts."""
    scaled = factor.value if isinstance(factor, ast.Subscript) else factor
    if flow.is_number(factor) or flow.is_own(scaled) or isinstance(scaled, ast.UnaryOp):
        return True
    return isinstance(scaled, ast.Name) and "mask" in scaled.id


def _gate(flow: Dataflow, statement: ast.stmt, product: ast.BinOp, factor: ast.expr, other: ast.expr) -> Gate | None:
    """The gate in which ``factor``, or all that its name stands for, is the result of an activation."""
    call, called_in = factor, statement
    if (definition := flow.definition_of(factor)) is not None:
        match definition.statement:
            case ast.Assign([ast.Name()], ast.Call() as call) if flow.is_read_only_in(definition, factor):
                called_in = definition.statement
            case _:
                return None
    act = activation_of(call, flow)
    between = [] if called_in is statement else flow.between(called_in, statement)
    if act is None or between is None:
        return None
    assert isinstance(call, ast.Call)
    # Once it is fused, the activation runs after these.
    earlier: list[ast.AST] = [*between] if called_in is statement else [*between, statement]
    earlier += [other] if called_in is statement and factor is product.left else []
    if flow.may_change(call.args[0], earlier):
        return None
    halves = _halves(flow, statement, product, call.args[0], other) if called_in is statement else None
    consumer = call_of_own(flow.parents[product], flow.own)
    linear = call_of_own(call.args[0], flow.own)
    return Gate(act, product, factor, call, linear, halves, flow.conditions(product, call), consumer)


def activation_of(node: ast.AST, flow: Dataflow) -> Callee | None:
    """What ``self.<name>(argument)`` or ``<function>(argument)`` with a known name calls, or None."""
    call = call_of_own(node, flow.own)
    if call is not None:
        return Callee(callee_name(call))
    if not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1 or isinstance(node.args[0], ast.Starred):
        return None
    root = node.func
    while isinstance(root, ast.Attribute):
        root = root.value
    name = ast.unparse(node.func)
    is_global = isinstance(root, ast.Name) and not flow.is_local(root.id)
    return Callee(name, True) if is_global and ACTIVATION_FUNCTION.search(name.rpartition(".")[2]) else None


def _written_out(node: ast.AST) -> Callee | None:
    """The expression ``x * sigmoid(a * x)``, with any factor or none, or None."""
    match node:
        case ast.BinOp(left, ast.Mult(), right):
            for x, call in ((left, right), (right, left)):
                match call:
                    case ast.Call(ast.Attribute(attr=name) | ast.Name(name)) if name == SIGMOID:
                        if ast.unparse(x) in map(ast.unparse, ast.walk(call)):
                            return Callee(ast.unparse(node), is_written_out=True)
    return None


def _halves(flow: Dataflow, statement: ast.stmt, product: ast.BinOp, gate: ast.expr, up: ast.expr) -> ast.Assign | None:
    """The statement that cuts one tensor into ``gate`` and ``up``, which only the product reads; or None."""
    first, second = (flow.definition_of(half.value if isinstance(half, ast.Subscript) else half) for half in (gate, up))
    if first is None or second is None or first.statement is not second.statement:
        return None
    cut = first.statement
    match cut, gate, up:
        case ast.Assign([ast.Tuple([ast.Name(a), ast.Name(b)])]), ast.Name(x), ast.Name(y) if (a, b) == (x, y):
            pass
        case ast.Assign([ast.Name()]), ast.Subscript(slice=ast.Constant(0)), ast.Subscript(slice=ast.Constant(1)):
            if first is not second:
                return None
        case _:
            return None
    assert isinstance(cut, ast.Assign)
    is_cut_in_two = isinstance(cut.value, ast.Call) and re.search(r"\.chunk\(2, (dim=)?-1\)$", ast.unparse(cut.value))
    between = flow.between(cut, statement)
    if not is_cut_in_two or between is None or any(map(edits_in_place, between)):
        return None
    return cut if all(flow.is_read_only_in(half, product) for half in (first, second)) else None
