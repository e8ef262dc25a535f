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
from dataclasses import dataclass
from itertools import permutations
from types import BuiltinFunctionType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...kernels.autocast import autocast_dtype
from ...kernels.glu import GLU, GLU_FOR_CONSUMERS
from ...kernels.reference import ACTIVATIONS, ActivationName
from ...kernels.switch import switch
from ..activation_recognition import looks_like_activation, recognise_activation
from ..adapters import adapter_reads_in, is_plain_in_4_bits, is_quantised, linear_reads_in
from ..block import Block
from ..dataflow import Conditions, Dataflow, edits_in_place, flow_of, may_hold
from ..four_bit import AdapterInput, FusedLinear4bit, Summands
from ..fused_block import Rewrite, runtime
from ..fused_norm_module import warn_once
from ..hooks import are_plain_calls, stock_class
from ..patch_report import Site
from ..probe import UnrecognisedError
from ..recompute import recomputes, recomputes_linears
from ..source import names_in
from .calls import Callee, EditedForward, Match, Patterns, call_of_own, callee_name

ACTIVATION_FUNCTION = re.compile("|".join(("swish", *ACTIVATIONS)))
"""Part of the names of functions that may be activations."""

_PACKED = "_fused_norm_packed"

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

    The part of a rewrite is ``consumer``, if the consumer is a linear of 4 bits or a LoRA layer around one.
    """

    pattern, kind = "gates", "mlp"

    act: Callee
    product: ast.BinOp
    factor: ast.expr
    call: ast.Call
    linear: ast.Call | None
    halves: ast.Assign | None
    conditions: Conditions
    consumer: ast.Call | None

    @classmethod
    def find(cls, layer: Any, found: Patterns) -> list[Gate]:
        """The products of something with what may be an activation."""
        flow = flow_of(layer)
        return [
            gate
            for statement in flow.body_of
            for product in _products(statement)
            for factor, other in permutations((product.left, product.right))
            if not _only_scales(other, flow)
            if (gate := _gate(flow, statement, product, factor, other)) is not None
        ]

    @classmethod
    def may_be_in(cls, module: nn.Module) -> bool:
        """Return whether a module's forward uses the name of an activation that it holds, or of a function."""
        names = names_in(stock_class(module))
        if any(map(ACTIVATION_FUNCTION.search, names)):
            return True
        functions = (FunctionType, BuiltinFunctionType)
        members: dict[str, Any] = {name: f for name, f in vars(module).items() if isinstance(f, functions)}
        members |= {name: child for name, child in module._modules.items() if child is not None}
        return any(name in names and looks_like_activation(name, member) for name, member in members.items())

    @classmethod
    def decide_all(cls, block: Block, found: Patterns) -> Iterator[Site]:
        """The rows of products with an activation as a factor, unless the module's settings never compute them."""
        rows: dict[ast.BinOp, Site] = {}
        for index, gate in enumerate(found.gates):
            earlier = rows.get(gate.product)
            if earlier is not None and earlier.activation is not None:
                continue
            row, act = block.own_row("mlp"), gate.act.resolve(block)
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
                block.rewrites.append(Rewrite("gates", index, parts, activation, f"gate ({activation.formula})"))
        reached = {gate.product for gate in found.gates if may_hold(gate.conditions, block.module)}
        yield from (row for product, row in rows.items() if product in reached)

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


@runtime
def fused_norm_gate(self: Any, activation: ActivationName, act: Any, *, gate: Any, up: Any) -> Any:
    """``act(gate) * up``; ``activation`` is the formula of ``act``."""
    if activation == "gelu_new" and gate.device.type != "cpu" and autocast_dtype(gate) is not None:
        gate = gate.float()  # as autocast casts the argument of ``pow``, with which all else is in float32
    outputs, reason = GLU.try_fused(gate, up, activation)
    if reason is None:
        return outputs
    warn_once(self.fused_norm_origin, reason)
    return act(gate) * up


@runtime
def fused_norm_gated(self: Any, activation: ActivationName, act: Any, linear: Any, **factors: Any) -> Any:
    """``linear(act(gate) * up)``; ``activation`` is the formula of ``act``.

    If the linear has 4 bits, or is a LoRA layer around one, it casts the product, which is written in the 16 bits
    that it reads. If such linears compute gate and up as well, they return what they add up in 16 bits, and not the
    sum in float32, so that gradients are of 16 bits, too.

    ``factors``: gate and up in their order in stock code; each is a tensor, or a pair of a linear and its input.
    """
    read = factors["gate"][1] if type(factors["gate"]) is tuple else factors["gate"]
    read = read.x if type(read) is AdapterInput else read
    products = None if torch.compiler.is_compiling() or type(read) is not Tensor else autocast_dtype(read)
    dtype, wide = _dtype_read_by(linear, products)
    summands = None if recomputes_linears() else products
    computed = {name: _computed(factor, summands) for name, factor in factors.items()}
    gate, up = computed["gate"], computed["up"]
    tensors: tuple[Any, Any, Any, Any] | None = None
    if type(gate) is type(up) is Summands and (gate.added is None) == (up.added is None):
        tensors = gate.base, up.base, gate.added, up.added
    else:
        gate, up = _sum(gate), _sum(up)
        if dtype is not None and getattr(gate, "dtype", None) == getattr(up, "dtype", None) == torch.float32:
            tensors = gate, up, None, None
    if tensors is not None:
        consumers = 1 if dtype is None or isinstance(linear, FusedLinear4bit) else 2
        outputs = self.fused_norm_product(activation, act, *tensors, consumers, dtype or torch.float32, wide)
        if outputs is not None:
            y, own = (outputs, outputs) if isinstance(outputs, Tensor) else (outputs[0], outputs[-1])
            return linear(y if dtype is None else AdapterInput(y, own, torch.float32))
    return linear(self.fused_norm_gate(activation, act, gate=_sum(gate), up=_sum(up)))


@runtime
def fused_norm_product(
    self: Any,
    activation: ActivationName,
    act: Any,
    gate: Tensor,
    up: Tensor,
    gate_added: Tensor | None,
    up_added: Tensor | None,
    consumers: int,
    dtype: torch.dtype,
    wide: int,
) -> Any:
    """``act(gate + gate_added) * (up + up_added)`` in float32, cast to ``dtype``: a tensor, or one per consumer.

    Consumers whose bits are set in ``wide`` get float32. None if kernels do not take it; inside ``disabled()``,
    where nothing calls it but to compare, the formula.
    """
    tensors = gate, up, gate_added, up_added
    outputs, reason = GLU_FOR_CONSUMERS.try_fused(*tensors, activation, consumers, dtype, wide)
    if reason is None:
        return outputs
    if not switch.depth:
        return None
    gate, up = (_sum(Summands(*summands)) for summands in ((gate, gate_added), (up, up_added)))
    y = act(gate) * up
    return y if wide else y.to(dtype)


@runtime
def fused_norm_gate_packed(self: Any, activation: ActivationName, act: Any, packed: Any) -> Any:
    """``act(gate) * up`` of the two halves of a tensor; ``activation`` is the formula of ``act``."""
    if activation == "gelu_new":  # of which autocast makes another dtype than up has
        gate, up = packed.chunk(2, dim=-1)
        return self.fused_norm_gate(activation, act, gate=gate, up=up)
    outputs, reason = GLU.try_fused(packed, None, activation)
    if reason is None:
        return outputs
    warn_once(self.fused_norm_origin, reason)
    gate, up = packed.chunk(2, dim=-1)
    return act(gate) * up


def _dtype_read_by(linear: Any, dtype: torch.dtype | None) -> tuple[torch.dtype | None, int]:
    """The 16 bits that a 4-bit linear, perhaps in a LoRA layer, casts a float32 input to; None if unknown.

    Also ``wide``, as ``GLU_FOR_CONSUMERS`` takes it: 2 if the layer's adapter, its second consumer, drops some of it.

    ``dtype``: autocast's.
    """
    if dtype is None or not getattr(linear, "fused_norm_is_quantised", False):
        return None, 0
    if not is_plain_in_4_bits(linear) or not linear_reads_in(linear, dtype):
        return None, 0
    if isinstance(linear, FusedLinear4bit) or adapter_reads_in(linear, dtype):
        return dtype, 0
    return (None, 0) if recomputes() else (dtype, 2)


def _computed(factor: Any, dtype: torch.dtype | None) -> Any:
    """A factor, or its summands if a 4-bit linear or its LoRA layer returns these.

    ``dtype``: that of products; None if the sum is wanted.
    """
    if type(factor) is not tuple:
        return factor
    linear, x = factor
    if dtype is None or not getattr(linear, "fused_norm_is_quantised", False):
        return linear(x)
    adapter_input = x if type(x) is AdapterInput else AdapterInput(x, x, None)
    # The guard of the layer has asked whether the calls of linears that get an ``AdapterInput`` are plain.
    if type(adapter_input.x) is not Tensor or (adapter_input is not x and not is_plain_in_4_bits(linear)):
        return linear(x)
    if (adapter_input.dtype or adapter_input.x.dtype) != torch.float32:
        return linear(x)
    return linear(AdapterInput(adapter_input.x, adapter_input.own, adapter_input.dtype, returns_summands=True))


def _sum(factor: Any) -> Any:
    """A factor as it is in stock code."""
    if type(factor) is not Summands:
        return factor
    return factor.base.float() if factor.added is None else factor.base.float() + factor.added
