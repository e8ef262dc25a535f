"""The product of a gated MLP: found in its source, and replaced by a call that computes it with the activation.

In the forward of an MLP,

    return self.down(self.act(self.gate(x)) * self.up(x))

becomes, whatever the names are,

    return self.down(self.fused_norm_gate("silu", self.act, gate=self.gate(x), up=self.up(x)))

The activation may be a function such as ``F.silu``, and it may stand in a statement of its own, ahead of the product.
Halves of one tensor stay together:

    gate, up = self.gate_up(x).chunk(2, dim=-1)
    hidden = up * self.act(gate)

becomes

    packed = self.gate_up(x)
    hidden = self.fused_norm_gate_packed("silu", self.act, packed)
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
from typing import Any

from torch import nn

from ..activation_recognition import looks_like_activation, recognise_activation
from ..block import Block
from ..dataflow import Conditions, Dataflow, come_out_so, edits_in_place
from ..hooks import has_hooks
from ..patch_report import Site
from ..probe import UnrecognisedError
from ..rewrite import Rewrite
from ..source import global_of
from .calls import Called, EditedForward, Match, Missed, call_of_own, called, is_name, make_call, operands_of

ACTIVATION_FUNCTION = re.compile(r"silu|swish|gelu")
"""Part of the names of functions that are taken for activations, where the module holds none."""

SIGMOID = "sigmoid"
"""The function that an activation is written out with: ``x * torch.sigmoid(a * x)``."""

_PACKED = "_fused_norm_packed"

_MULTIPLY = ("mul", "mul_", "multiply")
"""Methods and functions of PyTorch that multiply."""

_LATER = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp, ast.BoolOp)
"""Expressions whose parts may be computed several times, or never."""


@dataclass
class Gate(Match):
    """A product of something with what may be an activation.

    Attributes:
        act: what is called for the one factor.
        statement: the statement with the product.
        product: the product; where both factors are calls of attributes, that of two gates.
        factor: the factor that is the result of the activation.
        call: the call of the activation.
        called_in: the statement with that call; the one with the product, or an earlier one.
        halves: the statement that cuts one tensor into gate and up, None without one.
        conditions: those under which the product is computed, as far as settings of the module decide it.
    """

    act: Called
    statement: ast.stmt
    product: ast.BinOp
    factor: ast.expr
    call: ast.Call
    called_in: ast.stmt
    halves: ast.Assign | None
    conditions: Conditions

    def bypassed(self, parts: Sequence[str]) -> list[tuple[str, str]]:
        """See ``Match``."""
        return [("", self.act.name)]

    def edit(self, rewrite: Rewrite, forward: EditedForward) -> None:
        """Put the fused call in the product's place."""
        assert rewrite.activation is not None
        act, own, formula = self.call.func, forward.own, ast.Constant(rewrite.activation.formula)
        if self.halves is not None:
            packed = f"{_PACKED}{rewrite.index}"
            call = make_call(own, "fused_norm_gate_packed", [formula, act, ast.Name(packed, ast.Load())])
            halves = self.halves.value
            assert isinstance(halves, ast.Call)
            assert isinstance(halves.func, ast.Attribute)
            self.halves.targets, self.halves.value = [ast.Name(packed, ast.Store())], halves.func.value
            forward.replace(self.product, call)
            return
        factors = [
            ast.keyword("gate" if factor is self.factor else "up", factor)
            for factor in (self.product.left, self.product.right)
        ]
        forward.replace(self.product, make_call(own, "fused_norm_gate", [formula, act], factors))
        forward.replace(self.call, self.call.args[0])


def decide_gates(gates: Sequence[Gate], missed: Sequence[Missed], block: Block) -> Iterator[Site]:
    """The rows of products of something with an activation; one factor of each product is the activation.

    There are none of products that the module's settings never compute.
    """
    rows: dict[ast.BinOp, Site] = {}
    unreached = {gate.product for gate in gates if not come_out_so(gate.conditions, block.module)}
    for index, gate in enumerate(gates):
        known = rows.get(gate.product)
        if known is not None and known.activation is not None:
            continue
        row, act = block.own_row("mlp", block.done("gates", index) is not None), gate.act.found_in(block)
        if isinstance(act, nn.Module) and (has_hooks(act) or "forward" in vars(act)):
            row = row.kept_for("hooks or other code stand on its activation", "overridden")
        try:
            activation = recognise_activation(act)
        except UnrecognisedError as error:  # who hooks it may also have put attributes on it, as ZeRO-3 does
            if known is None and looks_like_activation(gate.act.name, act):
                rows[gate.product] = row.kept_for(str(error))
            continue
        rows[gate.product] = row = dataclasses.replace(row, activation=activation.formula)
        if row.reason is None:
            block.rewrites.append(Rewrite("gates", index, activation=activation))
    yield from (row for product, row in rows.items() if product not in unreached)
    yield from decide_missed_gates(missed, block, block.origin, "is written in a way that is not rewritten")


def decide_missed_gates(missed: Sequence[Missed], block: Block, function: Any, reason: str) -> Iterator[Site]:
    """The rows of products that cannot be fused, for a ``reason``.

    ``function``: what they are written in, a class for its forward.
    """
    for one in missed:
        if not come_out_so(one.conditions, block.module):
            continue
        row = block.own_row("mlp", already=False)
        if one.called.is_written_out:
            yield row.kept_for(f"its activation, {shorten(one.called.name, 80)}, is written out")
            continue
        with suppress(UnrecognisedError):
            found = global_of(function, one.called.name) if one.called.is_function else block.member(one.called.name)
            row = dataclasses.replace(row, activation=recognise_activation(found).formula)
            in_helper = function is not block.origin
            yield row.kept_for(f"its product, {shorten(one.source, 80)}, {reason}", in_helper=in_helper)


def find_gates(flow: Dataflow) -> list[Gate]:
    """The products of something with what may be an activation."""
    found = (
        _gate(flow, statement, product, factor)
        for body in flow.bodies
        for statement in body
        for product in _products(statement)
        for factor, other in permutations(operands_of(product, ast.Mult, (), flow), 2)
        if not _only_scales(other, flow)
    )
    return [gate for gate in found if gate is not None]


def find_missed_gates(definition: ast.FunctionDef, flow: Dataflow, gates: list[Gate]) -> list[Missed]:
    """The products of something with what may be an activation that are none of ``gates``, each one once."""
    fused = {(gate.product, gate.factor) for gate in gates}
    missed = [
        Missed(ast.unparse(node), act, flow.conditions(node, call))
        for node in ast.walk(definition)
        for factor, other in permutations(operands_of(node, ast.Mult, _MULTIPLY, flow), 2)
        if (node, factor) not in fused and not _only_scales(other, flow)
        for call in flow.origins(factor)
        if (act := activation_of(call, flow) or _written_out(call)) is not None
    ]
    return list(dict.fromkeys(missed))


def _products(statement: ast.stmt) -> Iterator[ast.BinOp]:
    """The products in a statement that is computed once, whenever it is reached."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)):
        return
    nodes: list[ast.AST] = [statement]
    while nodes:
        node = nodes.pop()
        if isinstance(node, _LATER):
            continue
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            yield node
        nodes += ast.iter_child_nodes(node)


def _only_scales(factor: ast.expr, flow: Dataflow) -> bool:
    """Return whether a factor is a number, an attribute of the module, which scales, or a mask, which broadcasts."""
    if flow.is_number(factor):
        return True
    if isinstance(factor, ast.Subscript):
        factor = factor.value
    if isinstance(factor, ast.Name):
        return "mask" in factor.id
    if isinstance(factor, ast.Attribute):
        return flow.is_own(factor)
    return isinstance(factor, ast.UnaryOp)


def _gate(flow: Dataflow, statement: ast.stmt, product: ast.BinOp, factor: ast.expr) -> Gate | None:
    """The gate in which ``factor``, or all that its name stands for, is the result of an activation."""
    definition = flow.definition_of(factor)
    call, called_in = factor, statement
    if definition is not None:
        value, at = definition.value, definition.statement
        if not isinstance(at, ast.Assign) or at.targets != [one for one in at.targets if is_name(one, definition.name)]:
            return None
        if not isinstance(value, ast.Call) or not flow.is_read_by_alone(definition, factor):
            return None
        call, called_in = value, at
    act = activation_of(call, flow)
    between = [] if called_in is statement else flow.between(called_in, statement)
    if act is None or between is None:
        return None
    assert isinstance(call, ast.Call)
    behind: list[ast.AST] = [*between]  # what the activation comes after once it is fused
    if called_in is not statement:
        behind.append(statement)
    elif factor is product.left:
        behind.append(product.right)
    if flow.may_change(call.args[0], behind):
        return None
    gate = Gate(act, statement, product, factor, call, called_in, None, flow.conditions(product, call))
    gate.halves = _halves(flow, gate)
    return gate


def activation_of(node: ast.AST, flow: Dataflow) -> Called | None:
    """The name called in ``self.<name>(argument)``, or in ``<function>(argument)`` by a known name; else None."""
    call = call_of_own(node, flow.own)
    if call is not None:
        return Called(called(call))
    if not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1 or isinstance(node.args[0], ast.Starred):
        return None
    root = node.func
    while isinstance(root, ast.Attribute):
        root = root.value
    name = ast.unparse(node.func)
    is_global = isinstance(root, ast.Name) and not flow.is_local(root.id)
    return Called(name, True) if is_global and ACTIVATION_FUNCTION.search(name.rpartition(".")[2]) else None


def _written_out(node: ast.AST) -> Called | None:
    """The expression ``x * sigmoid(x)``, whatever ``x`` is multiplied by in there; else None."""
    match node:
        case ast.BinOp(one, ast.Mult(), other):
            for x, call in ((one, other), (other, one)):
                match call:
                    case ast.Call(ast.Attribute(attr=name) | ast.Name(name)) if name == SIGMOID:
                        if ast.unparse(x) in map(ast.unparse, ast.walk(call)):
                            return Called(ast.unparse(node), is_written_out=True)
    return None


def _halves(flow: Dataflow, gate: Gate) -> ast.Assign | None:
    """The statement that cuts one tensor into the gate and the other factor, which nobody else reads."""
    other = gate.product.right if gate.factor is gate.product.left else gate.product.left
    halves = [gate.call.args[0], other]
    names = [half.value if isinstance(half, ast.Subscript) else half for half in halves]
    cuts = [flow.definition_of(name) for name in names]
    one, two = cuts
    if gate.called_in is not gate.statement or one is None or two is None or one.statement is not two.statement:
        return None
    cut = one.statement
    between = flow.between(cut, gate.statement)
    if not isinstance(cut, ast.Assign) or len(cut.targets) != 1 or not _is_cut_in_two(cut.value) or between is None:
        return None
    target = cut.targets[0]
    if isinstance(target, ast.Tuple):
        as_given = [getattr(name, "id", None) for name in target.elts] == [getattr(half, "id", "") for half in halves]
    else:
        numbers = [getattr(half.slice, "value", None) for half in halves if isinstance(half, ast.Subscript)]
        as_given = one is two and numbers == [0, 1]
    if not as_given or any(edits_in_place(statement) for statement in between):
        return None
    return cut if all(flow.is_read_by_alone(half, gate.product) for half in (one, two)) else None


def _is_cut_in_two(value: ast.expr) -> bool:
    """Return whether an expression is ``tensor.chunk(2, dim=-1)``."""
    is_call = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
    return is_call and ast.unparse(value).endswith((".chunk(2, dim=-1)", ".chunk(2, -1)"))
