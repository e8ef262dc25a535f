"""Forwards as text, before and after they are rewritten, and modules with plain arithmetic in which both run."""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import linecache
import re
import textwrap
from collections.abc import Mapping
from itertools import count
from types import SimpleNamespace
from typing import Any

from torch import nn

from fused_norm.patcher.activation_recognition import recognise_activation
from fused_norm.patcher.fused_block import Rewrite
from fused_norm.patcher.patterns import patterns_of, rewritten_forward


class Recorder:
    """The modules that forwards call. No two of them commute, so an operand out of place changes the value."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.flag = True
        self.factor = 7

    def norm(self, x):
        return x * 3 + 1

    def other(self, x):
        return x * 5 + 2

    def inner(self, x):
        return x * 11 + 4

    def third(self, x):
        return x * 37 + 9

    @property
    def norms(self):
        return [self.norm, self.other]

    def pair(self, x):
        return x, x + 1

    def q_norm(self, x):
        return Heads(x.value * 13 + 1)

    def k_norm(self, x):
        return Heads(x.value * 17 + 3)

    query_layernorm, key_layernorm = q_norm, k_norm

    def act(self, x):
        self.order.append("act")
        return x * 23 + 5

    def gate(self, x):
        self.order.append("gate")
        return x * 29 + 6

    def up(self, x):
        self.order.append("up")
        return x * 31 + 8

    def doubled(self, x):
        """As an in-place dropout does."""
        return x.mul_(2)

    def gate_up(self, x):
        return Packed(self.gate(x), self.up(x))

    def fused_norm_add(self, norm, residual, branch, *, inner=None, dropout=None, scale=1):
        branch = inner(branch) if inner else branch
        total = residual + (dropout(branch) if dropout else branch) * scale
        return norm(total), total

    def fused_norm_then_add(self, inner, residual, branch, *, dropout=None):
        branch = inner(branch)
        return residual + (dropout(branch) if dropout else branch)

    def fused_norm_read_dtype(self, attend, cache, mask, key, value, further):
        return None

    def fused_norm_rope(self, rotate, q, k, cos, sin, *further, dtype=None, **named):
        return rotate(q, k, cos, sin, *further, **named)

    def fused_norm_rope_one(self, rotate, x, cos, sin, **named):
        return rotate(x, cos, sin, **named)

    def fused_norm_gate(self, activation, act, *, gate, up):
        return act(gate) * up

    def fused_norm_gate_packed(self, activation, act, packed):
        gate, up = packed.chunk(2, dim=-1)
        return act(gate) * up

    def fused_norm_pair(self, q_norm, k_norm, q, k):
        return q_norm(q), k_norm(k)

    def fused_norm_rotated(self, q_norm, k_norm, rotate, q, k, cos, sin, *, dtype=None, **named):
        return rotate(q_norm(q), k_norm(k), cos, sin, **named)


class Heads:
    """A number with the methods of q and k that attentions call on them."""

    def __init__(self, value: int) -> None:
        self.value = value

    def transpose(self, *dims: int, **named: int) -> Heads:
        return Heads(self.value * 19 + 2) if 3 in dims else self

    def view(self, *shape: object) -> Heads:
        return self

    def mul_(self, factor: int) -> Heads:
        self.value *= factor
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Heads) and self.value == other.value

    __hash__ = None


class Packed:
    """Two numbers that are the halves of a tensor."""

    def __init__(self, *halves: int) -> None:
        self.halves = halves

    def chunk(self, count: int, dim: int) -> tuple[int, ...]:
        assert count == 2
        return self.halves

    def mul_(self, factor: int) -> None:
        self.halves = tuple(half * factor for half in self.halves)


def rotate(q: Heads, k: Heads, cos: int, sin: int, unsqueeze_dim: int = 1) -> tuple[Heads, Heads]:
    return Heads(q.value * cos + sin), Heads(k.value * cos - sin * unsqueeze_dim)


def rotate_one(x: Heads, cos: int, sin: int, unsqueeze_dim: int = 1) -> Heads:
    return Heads(x.value * cos + sin * unsqueeze_dim)


def embed(q: Heads, k: Heads, cos: int, sin: int) -> tuple[Heads, Heads]:
    return rotate(q, k, cos, sin)


class Cache:
    """A cache that returns other keys and values than it is updated with."""

    def update(self, k: Heads, v: Heads) -> tuple[Heads, Heads]:
        return Heads(k.value + 100), Heads(v.value + 200)

    def __repr__(self) -> str:
        return "kept"


def attend(layer: Recorder, q: Heads, k: Heads, v: Heads, mask: int, scaling: int = 1) -> tuple[int, Heads]:
    return q.value + 3 * k.value + 5 * v.value + 7 * mask + 11 * scaling, v


ATTENTIONS = {7: attend}


class Number:
    """A number that can be written into."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __mul__(self, other: Number | int) -> Number:
        return Number(self.value * getattr(other, "value", other))

    def __add__(self, other: Number | int) -> Number:
        return Number(self.value + getattr(other, "value", other))

    def mul_(self, factor: int) -> Number:
        self.value *= factor
        return self


def doubled(x: Number | Packed) -> Number:
    for number in getattr(x, "halves", (x,)):
        number.mul_(2)
    return number


def silu(x: int) -> int:
    return x * 41 + 3


functional = SimpleNamespace(
    nn=SimpleNamespace(silu=silu, dropout=lambda x, inplace: x.mul_(2), scale=lambda factor, out: out.mul_(factor))
)

NAMES = {**globals(), "contextlib": contextlib}
_number = count()


def layer_of(
    body: str, parameters: str = "a, b", base: type = Recorder, names: Mapping[str, object] = NAMES
) -> type[Any]:
    """Return a class whose forward has ``body``; ``names``: its globals, by default those of this module."""
    lines = textwrap.indent(textwrap.dedent(body).strip(), " " * 8)
    text = f"class Layer(Base):\n    def forward(self, {parameters}):\n{lines}\n"
    filename = f"<forward {next(_number)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    namespace = {**names, "Base": base}
    exec(compile(text, filename, "exec"), namespace)
    return namespace["Layer"]


def everything(layer: type) -> tuple[Rewrite, ...]:
    """Return the rewrites that fuse all matches in a forward."""
    patterns = patterns_of(layer)
    names = [zip(("norm", "inner", "dropout"), add.names, strict=True) for add in patterns.adds]
    adds = (Rewrite("adds", i, tuple(part for part, name in parts if name)) for i, parts in enumerate(names))
    heads = (Rewrite("heads", i, ("rotation",) if pair.rotate else ()) for i, pair in enumerate(patterns.heads))
    with_norms = {index for index, pair in enumerate(patterns.heads) if pair.rotate}
    alone = (i for i, call in enumerate(patterns.rotations) if call.arguments and call.heads not in with_norms)
    acts = [(i, gate) for i, gate in enumerate(patterns.gates) if "act" in gate.act.name or gate.act.is_function]
    products = {gate.product: i for i, gate in reversed(acts)}
    silu = recognise_activation(nn.SiLU())
    gates = (Rewrite("gates", i, activation=silu) for i in products.values())
    return (*adds, *heads, *(Rewrite("rotations", i) for i in alone), *gates)


def source_of_body(function: Any) -> str:
    """Return the body of a function, without the prefix of the names that rewriting introduces."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(definition, ast.FunctionDef)
    return re.sub(r"\b_fused_norm_", "", "\n".join(map(ast.unparse, definition.body)))


def assert_becomes(
    layer: type,
    after: str,
    *all_arguments: tuple[Any, ...],
    rewrites: tuple[Rewrite, ...] | None = None,
    in_order: bool = False,
) -> None:
    """Assert that the rewritten forward has the body ``after`` and returns what the original returns.

    ``rewrites``: those to apply, by default those of all matches. ``in_order``: also assert that the methods that note
    their calls in ``order`` are called in the same order.
    """
    rewrites = everything(layer) if rewrites is None else rewrites
    expected = ast.unparse(ast.parse(textwrap.dedent(after)))
    actual = source_of_body(rewritten_forward(layer, rewrites))
    assert actual == expected
    assert_same_values(layer, *all_arguments, rewrites=rewrites, in_order=in_order)


def assert_same_values(
    layer: type, *all_arguments: tuple[Any, ...], rewrites: tuple[Rewrite, ...] | None = None, in_order: bool = False
) -> None:
    """Assert what ``assert_becomes`` does of all calls."""
    forward = rewritten_forward(layer, everything(layer) if rewrites is None else rewrites)
    actual = source_of_body(forward)
    for arguments in all_arguments:
        stock, fused = layer(), layer()
        expected_value = stock.forward(*copy.deepcopy(arguments))
        assert forward(fused, *copy.deepcopy(arguments)) == expected_value, f"{actual}\nreturns another value"
        assert not in_order or fused.order == stock.order, f"{actual}\ncalls in another order"


def assert_unchanged(layer: type, *all_arguments: tuple[Any, ...]) -> None:
    """Assert that nothing in a forward is rewritten."""
    assert_becomes(layer, source_of_body(layer.forward), *all_arguments)
