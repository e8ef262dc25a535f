"""The norms of queries and keys in an attention: found in its source, and joined to one call.

In the forward of an attention,

    query = self.q_norm(expression).transpose(1, 2)
    key = self.k_norm(expression).transpose(1, 2)
    cos, sin = position_embeddings
    query, key = rotate(query, key, cos, sin)

becomes, whatever the names are,

    postponed = self.fused_norm_may_postpone(self.q_norm, self.k_norm)
    query = self.fused_norm_unless_postponed(postponed, self.q_norm, expression).transpose(1, 2)
    key = self.fused_norm_unless_postponed(postponed, self.k_norm, expression).transpose(1, 2)
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

from ..dataflow import Dataflow, edits_in_place, mentions
from .calls import Rewrite, call_of_own, called, make_call, postpone

QK_NAME = re.compile(r"(q|k|qk|query|key)_?(layer_?)?norm")
"""The names of norms of queries and keys."""

_POSTPONED = "_fused_norm_postponed"


@dataclass
class HeadNorm:
    """The statement ``name = self.<q or k norm>(expression)``, and the call in it."""

    statement: ast.Assign
    call: ast.Call
    name: str


@dataclass
class Heads:
    """The norms of one attention's queries and keys, in ``body``.

    Attributes:
        norms: the norm of one, and that of the other.
        rotation: the call ``rotate(q, k, cos, sin)`` that takes both normed tensors next, and its statement; None
            where there is none.
    """

    body: list[ast.stmt]
    norms: tuple[HeadNorm, HeadNorm]
    rotation: tuple[ast.Assign, ast.Call] | None

    @property
    def names(self) -> tuple[str, str]:
        """The attributes of the attention that hold the norms."""
        one, other = self.norms
        return called(one.call), called(other.call)

    @property
    def rotate(self) -> str | None:
        """The global name of the function that rotates, None where none does."""
        if self.rotation is None:
            return None
        assert isinstance(self.rotation[1].func, ast.Name)
        return self.rotation[1].func.id

    def edit(self, rewrite: Rewrite, own: str) -> None:
        """Put the fused calls in the place of the norms."""
        name = f"{_POSTPONED}{rewrite.index}"
        first, second = self.norms
        norms = [first.call.func, second.call.func]
        for norm in self.norms:
            postpone(norm.call, own, name)
        ask = ast.Assign([ast.Name(name, ast.Store())], make_call(own, "fused_norm_may_postpone", norms))
        self.body.insert(self.body.index(first.statement), ask)
        arguments = [ast.Name(name, ast.Load()), *norms]
        if "rotation" in rewrite.parts:
            assert self.rotation is not None
            statement, rotate = self.rotation
            arguments += [rotate.func, *rotate.args]
            statement.value = make_call(own, "fused_norm_rotated", arguments, rotate.keywords)
            return
        arguments += [ast.Name(norm.name, ast.Load()) for norm in self.norms]
        results: list[ast.expr] = [ast.Name(norm.name, ast.Store()) for norm in self.norms]
        both = ast.Assign([ast.Tuple(results, ast.Store())], make_call(own, "fused_norm_pair", arguments))
        self.body.insert(self.body.index(second.statement) + 1, both)


def find_heads(flow: Dataflow) -> list[Heads]:
    """The pairs of q and k norms, in order; none that a function inside may read, whenever that is called."""
    return [
        heads
        for body in flow.bodies
        for heads in _heads_in(flow, body)
        if not flow.is_captured(*(norm.name for norm in heads.norms))
    ]


def _heads_in(flow: Dataflow, body: list[ast.stmt]) -> Iterator[Heads]:
    first: HeadNorm | None = None
    for statement in body:
        found = _head_norm(statement, flow.own)
        if first is not None and (mentions(statement, first.name) or edits_in_place(statement)):
            first = None
        if first is not None and found is not None and not _writes_input(flow, first, found):
            yield Heads(body, (first, found), _rotation(flow, found.statement, (first.name, found.name)))
            first = None
        elif found is not None:
            first = found


def _writes_input(flow: Dataflow, first: HeadNorm, second: HeadNorm) -> bool:
    """Return whether what comes after the first norm, and now would come before, may write into what it takes."""
    between = flow.between(first.statement, second.statement) or []
    return flow.may_change(first.call.args[0], [*between, *second.call.args])


def _head_norm(statement: ast.stmt, own: str) -> HeadNorm | None:
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
    call = call_of_own(value, own)
    if not isinstance(target, ast.Name) or call is None or not QK_NAME.fullmatch(called(call)):
        return None
    return HeadNorm(statement, call, target.id)


def _rotation(flow: Dataflow, second: ast.stmt, names: tuple[str, str]) -> tuple[ast.Assign, ast.Call] | None:
    """``q, k = rotate(q, k, cos, sin)``, perhaps with a constant ``unsqueeze_dim``, the first to read q or k."""
    touching = (one for one in flow.after(second) if mentions(one, *names) or edits_in_place(one))
    statement = next(touching, None)
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
    return statement, call
