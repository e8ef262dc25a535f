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

from .statements import bodies, call_of_own, called_attribute, edits_in_place, mentions

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
class PlacedPair:
    """A ``Pair`` and the statements it is made of, in ``body``."""

    pair: Pair
    body: list[ast.stmt]
    statements: tuple[ast.Assign, ast.Assign]
    calls: tuple[ast.Call, ast.Call]
    names: tuple[str, str]
    rotation: ast.Assign | None


def find_pairs(definition: ast.FunctionDef, self_name: str) -> list[PlacedPair]:
    """The pairs of q and k norms, in order."""
    return [pair for body in bodies(definition) for pair in _pairs_in(body, self_name)]


def fuse_pair(place: PlacedPair, rewrite: PairRewrite, self_name: str) -> None:
    """Put the fused calls in the place of the norms."""

    def own(method: str, *arguments: ast.expr) -> ast.Call:
        return ast.Call(ast.Attribute(ast.Name(self_name, ast.Load()), method, ast.Load()), list(arguments), [])

    postponed = f"{_POSTPONED}{rewrite.index}"
    norms = [call.func for call in place.calls]
    for call in place.calls:
        call.args = [ast.Name(postponed, ast.Load()), call.func, *call.args]
        call.func = ast.Attribute(ast.Name(self_name, ast.Load()), "fused_norm_unless", ast.Load())
    first, second = place.statements
    ask = ast.Assign([ast.Name(postponed, ast.Store())], own("fused_norm_may_postpone", *norms))
    place.body.insert(place.body.index(first), ask)
    if rewrite.rotate:
        assert place.rotation is not None
        rotation = place.rotation.value
        assert isinstance(rotation, ast.Call)
        together = own("fused_norm_rotated", ast.Name(postponed, ast.Load()), *norms, rotation.func, *rotation.args)
        together.keywords = rotation.keywords
        place.rotation.value = together
        return
    loads = [ast.Name(name, ast.Load()) for name in place.names]
    stores: list[ast.expr] = [ast.Name(name, ast.Store()) for name in place.names]
    together = own("fused_norm_pair", ast.Name(postponed, ast.Load()), *norms, *loads)
    place.body.insert(place.body.index(second) + 1, ast.Assign([ast.Tuple(stores, ast.Store())], together))


def _pairs_in(body: list[ast.stmt], self_name: str) -> Iterator[PlacedPair]:
    first: tuple[int, ast.Assign, ast.Call, str] | None = None
    for position, statement in enumerate(body):
        found = _head_norm(statement, self_name)
        if first is not None and found is not None and not mentions(statement, first[3]):
            yield _placed(body, first, (position, *found))
            first = None
        elif found is not None:
            first = (position, *found)
        elif first is not None and (mentions(statement, first[3]) or edits_in_place(statement)):
            first = None


def _placed(
    body: list[ast.stmt],
    first: tuple[int, ast.Assign, ast.Call, str],
    second: tuple[int, ast.Assign, ast.Call, str],
) -> PlacedPair:
    names = (first[3], second[3])
    following = next(
        (statement for statement in body[second[0] + 1 :] if mentions(statement, *names) or edits_in_place(statement)),
        None,
    )
    rotate = _rotation(following, names)
    return PlacedPair(
        Pair(called_attribute(first[2]), called_attribute(second[2]), rotate),
        body,
        (first[1], second[1]),
        (first[2], second[2]),
        names,
        following if rotate is not None else None,  # type: ignore[arg-type]
    )


def _head_norm(statement: ast.stmt, self_name: str) -> tuple[ast.Assign, ast.Call, str] | None:
    """Statement, call and name of ``name = self.<q or k norm>(expression)``, perhaps with ``.transpose(1, 2)``."""
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
    return statement, call, target.id


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
