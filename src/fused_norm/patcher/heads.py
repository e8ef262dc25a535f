"""The norms of queries and keys in an attention: found in its source and made in one call, perhaps with the rotation.

In the forward of an attention,

    query = self.q_norm(expression).transpose(1, 2)
    key = self.k_norm(expression).transpose(1, 2)
    cos, sin = position_embeddings
    query, key = rotate(query, key, cos, sin)

becomes, whatever the names are,

    free = self.fused_norm_free(self.q_norm, self.k_norm)
    query = self.fused_norm_unless(free, self.q_norm, expression).transpose(1, 2)
    key = self.fused_norm_unless(free, self.k_norm, expression).transpose(1, 2)
    cos, sin = position_embeddings
    query, key = self.fused_norm_rotated(free, self.q_norm, self.k_norm, rotate, query, key, cos, sin)

A norm of the last dimension may wait until leading ones have changed places. Where hooks or wrappers must see each norm
as a call of its own, ``free`` is false and all of it happens as before, in the order of before. Norms that no rotation
follows directly are made together as soon as both inputs are there, by ``fused_norm_heads``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .stream import bodies, call_of_own, edits_in_place, mentions

QK_NAME = re.compile(r"(q|k|qk|query|key)_?(layer_?)?norm")
"""What norms of queries and keys are called."""

_FREE = "_fused_norm_free"


@dataclass(frozen=True)
class Heads:
    """The norms of one attention's queries and keys.

    Attributes:
        q_norm, k_norm: their attributes.
        rotate: the global name of the function that takes both normed tensors next, None where none does.
    """

    q_norm: str
    k_norm: str
    rotate: str | None


@dataclass(frozen=True)
class HeadsRewrite:
    """What is fused of the heads number ``index``: the two norms, and the rotation if ``rotate``."""

    index: int
    rotate: bool


@dataclass
class PlacedHeads:
    """``Heads`` and the statements that they are made of, in ``body``."""

    heads: Heads
    body: list[ast.stmt]
    statements: tuple[ast.Assign, ast.Assign]
    calls: tuple[ast.Call, ast.Call]
    names: tuple[str, str]
    rotation: ast.Assign | None


def find_heads(definition: ast.FunctionDef, self_name: str) -> list[PlacedHeads]:
    """The pairs of q and k norms, in order."""
    return [heads for body in bodies(definition) for heads in _heads_in(body, self_name)]


def make_together(place: PlacedHeads, rewrite: HeadsRewrite, self_name: str) -> None:
    """Puts the fused calls in the place of the norms."""

    def own(method: str, *arguments: ast.expr) -> ast.Call:
        return ast.Call(ast.Attribute(ast.Name(self_name, ast.Load()), method, ast.Load()), list(arguments), [])

    free = f"{_FREE}{rewrite.index}"
    norms = [call.func for call in place.calls]
    for call in place.calls:
        call.args = [ast.Name(free, ast.Load()), call.func, *call.args]
        call.func = ast.Attribute(ast.Name(self_name, ast.Load()), "fused_norm_unless", ast.Load())
    first, second = place.statements
    asked = ast.Assign([ast.Name(free, ast.Store())], own("fused_norm_free", *norms))
    place.body.insert(place.body.index(first), asked)
    if rewrite.rotate:
        assert place.rotation is not None
        rotation = place.rotation.value
        assert isinstance(rotation, ast.Call)
        together = own("fused_norm_rotated", ast.Name(free, ast.Load()), *norms, rotation.func, *rotation.args)
        together.keywords = rotation.keywords
        place.rotation.value = together
        return
    loads = [ast.Name(name, ast.Load()) for name in place.names]
    stores: list[ast.expr] = [ast.Name(name, ast.Store()) for name in place.names]
    together = own("fused_norm_heads", ast.Name(free, ast.Load()), *norms, *loads)
    place.body.insert(place.body.index(second) + 1, ast.Assign([ast.Tuple(stores, ast.Store())], together))


def _heads_in(body: list[ast.stmt], self_name: str) -> Iterator[PlacedHeads]:
    first: tuple[int, ast.Assign, ast.Call, str] | None = None
    for position, statement in enumerate(body):
        found = _normed_heads(statement, self_name)
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
) -> PlacedHeads:
    names = (first[3], second[3])
    following = next(
        (statement for statement in body[second[0] + 1 :] if mentions(statement, *names) or edits_in_place(statement)),
        None,
    )
    rotate = _rotation(following, names)
    q_norm, k_norm = (call.func.attr for call in (first[2], second[2]))  # type: ignore[attr-defined]
    return PlacedHeads(
        Heads(q_norm, k_norm, rotate),
        body,
        (first[1], second[1]),
        (first[2], second[2]),
        names,
        following if rotate is not None else None,  # type: ignore[arg-type]
    )


def _normed_heads(statement: ast.stmt, self_name: str) -> tuple[ast.Assign, ast.Call, str] | None:
    """A statement ``name = self.<q or k norm>(expression)``, perhaps with ``.transpose(1, 2)``; its call; the name."""
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
    if not isinstance(target, ast.Name) or call is None or not QK_NAME.fullmatch(call.func.attr):  # type: ignore[attr-defined]
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
