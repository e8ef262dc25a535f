"""The product of a gated MLP: found in its source, and replaced by a call that computes it with the activation.

In the forward of an MLP,

    return self.down(self.act(self.gate(x)) * self.up(x))

becomes, whatever the names are,

    activation = self.fused_norm_activation(self.act)
    return self.down(self.fused_norm_gate(
        activation, self.act, gate=self.fused_norm_unless(activation, self.act, self.gate(x)), up=self.up(x)))

The activation may be a function such as ``F.silu``, and it may stand in a statement of its own, ahead of the product.
Where hooks or other code must see its call, ``activation`` is None and everything happens in the original order. Halves
of one tensor stay together:

    gate, up = self.gate_up(x).chunk(2, dim=-1)
    hidden = up * self.act(gate)

becomes

    packed = self.gate_up(x)
    hidden = self.fused_norm_gate_packed(self.act, packed)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .activation_recognition import Activation
from .statements import bodies, call_of_own, called_attribute, edits_in_place, make_call, mentions, replace

ACTIVATION_FUNCTION = re.compile(r"silu|swish|gelu")
"""Part of the names of functions that are taken for activations, where the module holds none."""

_ACTIVATION = "_fused_norm_activation"
_PACKED = "_fused_norm_packed"


@dataclass(frozen=True)
class Gate:
    """A product of something with what may be an activation.

    Attributes:
        act: the attribute that is called for the one factor, or the function, such as ``F.silu``.
        is_function: it is a function, by its global name.
        product: its number; both factors of a product may be calls of attributes.
    """

    act: str
    is_function: bool
    product: int


@dataclass(frozen=True)
class GateRewrite:
    """The gate number ``index``, to be fused with this activation."""

    index: int
    activation: Activation


@dataclass
class PlacedGate:
    """A ``Gate`` and the nodes it is made of, in ``body``.

    Attributes:
        statement: the statement with the product.
        product: the product.
        factor: the factor that is the result of the activation.
        call: the call of the activation.
        called: the statement with that call; the one with the product, or an earlier one.
        halves: the statement that cuts one tensor into gate and up, None without one.
    """

    gate: Gate
    body: list[ast.stmt]
    statement: ast.stmt
    product: ast.BinOp
    factor: ast.expr
    call: ast.Call
    called: ast.stmt
    halves: ast.Assign | None


def find_gates(definition: ast.FunctionDef, self_name: str) -> list[PlacedGate]:
    """The products of something with what may be an activation."""
    found: list[PlacedGate] = []
    products = 0
    for body in bodies(definition):
        for statement in body:
            for product in _products(statement):
                places = [
                    PlacedGate(_gate(call, products, self_name), body, statement, product, factor, call, at, None)
                    for factor, other in ((product.left, product.right), (product.right, product.left))
                    if not _only_scales(other, self_name)
                    for call, at in _activation(factor, definition, body, statement, self_name)
                ]
                for place in places:
                    place.halves = _halves(place, definition)
                found += places
                products += bool(places)
    return found


def _gate(call: ast.Call, product: int, self_name: str) -> Gate:
    if call_of_own(call, self_name) is not None:
        return Gate(called_attribute(call), False, product)
    return Gate(ast.unparse(call.func), True, product)


def fuse_gate(place: PlacedGate, rewrite: GateRewrite, self_name: str) -> None:
    """Put the fused call in the product's place."""
    act, (argument,) = place.call.func, place.call.args
    if place.halves is not None:
        packed = f"{_PACKED}{rewrite.index}"
        call = make_call(self_name, "fused_norm_gate_packed", [act, ast.Name(packed, ast.Load())], [])
        halves = place.halves.value
        assert isinstance(halves, ast.Call)
        assert isinstance(halves.func, ast.Attribute)
        place.halves.targets, place.halves.value = [ast.Name(packed, ast.Store())], halves.func.value
        replace(place.statement, place.product, call)
        return
    activation = f"{_ACTIVATION}{rewrite.index}"
    ask = ast.Assign([ast.Name(activation, ast.Store())], make_call(self_name, "fused_norm_activation", [act], []))
    place.body.insert(place.body.index(place.called), ask)
    name = ast.Name(activation, ast.Load())
    factors = [
        ast.keyword("gate" if factor is place.factor else "up", factor)
        for factor in (place.product.left, place.product.right)
    ]
    replace(place.statement, place.product, make_call(self_name, "fused_norm_gate", [name, act], factors))
    place.call.func = ast.Attribute(ast.Name(self_name, ast.Load()), "fused_norm_unless", ast.Load())
    place.call.args = [name, act, argument]


def _products(statement: ast.stmt) -> Iterator[ast.BinOp]:
    """The products in a statement that is computed once, whenever it is reached."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)):
        return
    later = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp, ast.BoolOp)
    nodes: list[ast.AST] = [statement]
    while nodes:
        node = nodes.pop()
        if isinstance(node, later):
            continue
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            yield node
        nodes += ast.iter_child_nodes(node)


def _only_scales(factor: ast.expr, self_name: str) -> bool:
    """Return whether a factor is a number, an attribute of the module, which scales, or a mask, which broadcasts."""
    if isinstance(factor, ast.Name):
        return "mask" in factor.id
    if isinstance(factor, ast.Attribute):
        return isinstance(factor.value, ast.Name) and factor.value.id == self_name
    return isinstance(factor, (ast.Constant, ast.UnaryOp))


def _activation(
    factor: ast.expr, definition: ast.FunctionDef, body: list[ast.stmt], statement: ast.stmt, self_name: str
) -> Iterator[tuple[ast.Call, ast.stmt]]:
    """``<activation>(argument)`` and its statement, where it is the factor or all that the factor's name stands for."""
    call = _activation_call(factor, definition, self_name)
    if call is not None:
        yield call, statement
    if not isinstance(factor, ast.Name) or _loads(definition, factor.id) != [factor]:
        return
    stores = [node for node in ast.walk(definition) if _is_store(node, factor.id)]
    position = body.index(statement)
    for index, earlier in enumerate(body[:position]):
        if not isinstance(earlier, ast.Assign) or stores != earlier.targets:
            continue
        call = _activation_call(earlier.value, definition, self_name)
        if call is not None and not any(edits_in_place(between) for between in body[index + 1 : position + 1]):
            yield call, earlier


def _activation_call(node: ast.expr, definition: ast.FunctionDef, self_name: str) -> ast.Call | None:
    """``node`` where it is ``self.<name>(argument)``, or ``<function>(argument)`` by the name of an activation."""
    call = call_of_own(node, self_name)
    if call is not None or not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1:
        return call
    root = node.func
    while isinstance(root, ast.Attribute):
        root = root.value
    if not isinstance(root, ast.Name) or isinstance(node.args[0], ast.Starred) or _is_local(definition, root.id):
        return None
    return node if ACTIVATION_FUNCTION.search(ast.unparse(node.func).rpartition(".")[2]) else None


def _is_local(definition: ast.FunctionDef, name: str) -> bool:
    given = [node.arg for node in ast.walk(definition.args) if isinstance(node, ast.arg)]
    return name in given or any(_is_store(node, name) for node in ast.walk(definition))


def _halves(place: PlacedGate, definition: ast.FunctionDef) -> ast.Assign | None:
    """The statement that cuts one tensor into the gate and the other factor, which nobody else reads."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    inner = any(isinstance(node, functions) and node is not definition for node in ast.walk(definition))
    if place.called is not place.statement or inner:  # a function inside may read the halves whenever it is called
        return None
    other = place.product.right if place.factor is place.product.left else place.product.left
    gate = place.call.args[0]
    position = place.body.index(place.statement)
    for index, earlier in enumerate(place.body[:position]):
        if not isinstance(earlier, ast.Assign) or len(earlier.targets) != 1 or not _is_cut_in_two(earlier.value):
            continue
        between = place.body[index + 1 : position]
        target, names = earlier.targets[0], []
        if isinstance(target, ast.Tuple) and [getattr(name, "id", None) for name in target.elts] == [
            getattr(gate, "id", ""),
            getattr(other, "id", ""),
        ]:
            names = [name.id for name in (gate, other) if isinstance(name, ast.Name)]
        elif isinstance(target, ast.Name) and [_item(half, target.id) for half in (gate, other)] == [0, 1]:
            names = [target.id]
        if not names or any(mentions(statement, *names) or edits_in_place(statement) for statement in between):
            continue
        if all(_is_read_in_product_alone(name, place, earlier, definition) for name in names):
            return earlier
    return None


def _is_read_in_product_alone(name: str, place: PlacedGate, halves: ast.Assign, definition: ast.FunctionDef) -> bool:
    """Return whether what ``halves`` assigns to a name is read in the product, and nowhere else."""
    inside = list(ast.walk(place.product))
    elsewhere = [load for load in _loads(definition, name) if load not in inside]
    if place.body is definition.body:  # which runs from top to bottom, once
        free = place.body[: place.body.index(halves) + 1]
        if any(_is_store(node, name) for node in ast.walk(place.statement)):
            free += place.body[place.body.index(place.statement) + 1 :]
        nodes = [node for statement in free for node in ast.walk(statement)]
        elsewhere = [load for load in elsewhere if load not in nodes]
    return not elsewhere


def _is_cut_in_two(value: ast.expr) -> bool:
    """Return whether an expression is ``tensor.chunk(2, dim=-1)``."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute) or value.func.attr != "chunk":
        return False
    if isinstance(value.func.value, ast.Name) and value.func.value.id == "torch":
        return False
    given = [*value.args, *(keyword.value for keyword in value.keywords if keyword.arg == "dim")]
    return len(given) == len(value.args) + len(value.keywords) and [ast.unparse(one) for one in given] == ["2", "-1"]


def _item(node: ast.expr, name: str) -> int | None:
    """``i`` of ``name[i]``."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == name:
        return getattr(node.slice, "value", None)
    return None


def _loads(definition: ast.FunctionDef, name: str) -> list[ast.Name]:
    return [
        node
        for node in ast.walk(definition)
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, (ast.Load, ast.Del))
    ]


def _is_store(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
