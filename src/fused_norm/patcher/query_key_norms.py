"""The norms of queries and keys in an attention: found in its source, and joined to one call.

In the forward of an attention,

    query = self.q_norm(expression).transpose(1, 2)
    key = self.k_norm(expression).transpose(1, 2)
    cos, sin = position_embeddings
    query, key = rotate(query, key, cos, sin)

becomes, whatever the names are,

    postponed = self.fused_norm_may_postpone(self.q_norm, self.k_norm)
    query = self.fused_norm_unless(postponed, self.q_norm, expression).transpose(1, 2)
    key = self.fused_norm_unless(postponed, self.k_norm, expression).transpose(1, 2)
    cos, sin = position_embeddings
    query, key = self.fused_norm_rotated(postponed, self.q_norm, self.k_norm, rotate, query, key, cos, sin)

A norm of the last dimension may come after leading dimensions have changed places. Where hooks or wrappers must see
each norm as a call of its own, ``postponed`` is false and everything happens in the original order. Norms that no
rotation follows directly are computed together as soon as both inputs are there, by ``fused_norm_pair``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .statements import bodies, call_of_own, called_attribute, edits_in_place, make_call, mentions

QK_NAME = re.compile(r"(q|k|qk|query|key)_?(layer_?)?norm")
"""The names of norms of queries and keys."""

_POSTPONED = "_fused_norm_postponed"


@dataclass(frozen=True)
class Pair:
    """The norms of one attention's queries and keys.

    Attributes:
        q_norm, k_norm: the attributes of the attention that hold them.
        rotate: the global name of the function that takes both normed tensors next, None where none does.
    """

    q_norm: str
    k_norm: str
    rotate: str | None


@dataclass(frozen=True)
class PairRewrite:
    """The pair number ``index``, to be fused, together with the rotation after it if ``rotate``."""

    index: int
    rotate: bool


@dataclass
class HeadNorm:
    """The statement ``name = self.<q or k norm>(expression)``, and the call in it."""

    statement: ast.Assign
    call: ast.Call
    name: str


@dataclass
class PlacedPair:
    """A ``Pair`` and the statements it is made of, in ``body``."""

    pair: Pair
    body: list[ast.stmt]
    norms: tuple[HeadNorm, HeadNorm]
    rotation: ast.Assign | None


def find_pairs(definition: ast.FunctionDef, self_name: str) -> list[PlacedPair]:
    """The pairs of q and k norms, in order; none that a function inside may read, whenever that is called."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    inner = [node for node in ast.walk(definition) if isinstance(node, functions) and node is not definition]
    return [
        pair
        for body in bodies(definition)
        for pair in _pairs_in(body, self_name)
        if not any(mentions(function, *(norm.name for norm in pair.norms)) for function in inner)
    ]


def fuse_pair(place: PlacedPair, rewrite: PairRewrite, self_name: str) -> None:
    """Put the fused calls in the place of the norms."""
    name = f"{_POSTPONED}{rewrite.index}"
    first, second = place.norms
    norms = [first.call.func, second.call.func]
    for norm in place.norms:
        norm.call.args = [ast.Name(name, ast.Load()), norm.call.func, *norm.call.args]
        norm.call.func = ast.Attribute(ast.Name(self_name, ast.Load()), "fused_norm_unless", ast.Load())
    ask = ast.Assign([ast.Name(name, ast.Store())], make_call(self_name, "fused_norm_may_postpone", norms, []))
    place.body.insert(place.body.index(first.statement), ask)
    arguments = [ast.Name(name, ast.Load()), *norms]
    if rewrite.rotate:
        assert place.rotation is not None
        rotate = place.rotation.value
        assert isinstance(rotate, ast.Call)
        arguments += [rotate.func, *rotate.args]
        place.rotation.value = make_call(self_name, "fused_norm_rotated", arguments, rotate.keywords)
        return
    arguments += [ast.Name(norm.name, ast.Load()) for norm in place.norms]
    results: list[ast.expr] = [ast.Name(norm.name, ast.Store()) for norm in place.norms]
    both = ast.Assign([ast.Tuple(results, ast.Store())], make_call(self_name, "fused_norm_pair", arguments, []))
    place.body.insert(place.body.index(second.statement) + 1, both)


def _pairs_in(body: list[ast.stmt], self_name: str) -> Iterator[PlacedPair]:
    first: HeadNorm | None = None
    for position, statement in enumerate(body):
        found = _head_norm(statement, self_name)
        if first is not None and found is not None and not mentions(statement, first.name):
            yield _placed(body, position, first, found)
            first = None
        elif found is not None:
            first = found
        elif first is not None and (mentions(statement, first.name) or edits_in_place(statement)):
            first = None


def _placed(body: list[ast.stmt], position: int, first: HeadNorm, second: HeadNorm) -> PlacedPair:
    """The pair whose second norm is in statement number ``position``, and the rotation after it."""
    names = (first.name, second.name)
    following = next(
        (statement for statement in body[position + 1 :] if mentions(statement, *names) or edits_in_place(statement)),
        None,
    )
    rotate = _rotation(following, names)
    pair = Pair(called_attribute(first.call), called_attribute(second.call), rotate)
    return PlacedPair(pair, body, (first, second), following if rotate is not None else None)  # type: ignore[arg-type]


def _head_norm(statement: ast.stmt, self_name: str) -> HeadNorm | None:
    """The norm that a statement computes, where that is all it does, perhaps with ``.transpose(1, 2)``."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target, value = statement.targets[0], statement.value
    if (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr == "transpose"
        and not value.keywords
        and [getattr(argument, "value", None) for argument in value.args] == [1, 2]
    ):
        value = value.func.value
    call = call_of_own(value, self_name)
    if not isinstance(target, ast.Name) or call is None or not QK_NAME.fullmatch(called_attribute(call)):
        return None
    return HeadNorm(statement, call, target.id)


def _rotation(statement: ast.stmt | None, names: tuple[str, str]) -> str | None:
    """``rotate`` of ``q, k = rotate(q, k, cos, sin)``, perhaps with a constant ``unsqueeze_dim``."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target, call = statement.targets[0], statement.value
    if not isinstance(target, ast.Tuple) or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return None
    if tuple(getattr(element, "id", None) for element in target.elts) != names or len(call.args) != 4:
        return None
    if tuple(getattr(argument, "id", None) for argument in call.args[:2]) != names:
        return None
    if any(isinstance(argument, ast.Starred) or mentions(argument, *names) for argument in call.args[2:]):
        return None
    if any(keyword.arg != "unsqueeze_dim" or not isinstance(keyword.value, ast.Constant) for keyword in call.keywords):
        return None
    return call.func.id
