"""The norms of queries and keys in an attention: found in its source, and joined to one call.

In the forward of an attention,

    query = self.q_norm(expression).transpose(1, 2)
    key = self.k_norm(expression).transpose(1, 2)
    cos, sin = position_embeddings
    query, key = rotate(query, key, cos, sin)

becomes, whatever the names are,

    query = expression.transpose(1, 2)
    key = expression.transpose(1, 2)
    cos, sin = position_embeddings
    query, key = self.fused_norm_rotated(self.q_norm, self.k_norm, rotate, query, key, cos, sin)

A norm of the last dimension may come after leading dimensions have changed places. Norms that no rotation follows
directly are computed together as soon as both inputs are there, by ``fused_norm_pair``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from ...spec import Kind
from ..block import Block, alike
from ..dataflow import Dataflow, edits_in_place, mentions
from ..patch_report import Site
from ..rewrite import Rewrite
from .attentions import Attention
from .calls import EditedForward, Match, call_of_own, called, make_call
from .rotations import unless_unrecognised

QK_NAME = re.compile(r"(q|k|qk|query|key)_?(layer_?)?norm")
"""The names of norms of queries and keys."""


@dataclass
class HeadNorm:
    """The statement ``name = self.<q or k norm>(expression)``, and the call in it."""

    statement: ast.Assign
    call: ast.Call
    name: str


@dataclass
class Heads(Match):
    """The norms of one attention's queries and keys.

    Attributes:
        norms: the norm of one, and that of the other.
        rotation: the call ``rotate(q, k, cos, sin)`` that takes both normed tensors next, and its statement; None
            where there is none.
        attention: what follows that rotation, and alone reads its results; None where it is something else.
    """

    norms: tuple[HeadNorm, HeadNorm]
    rotation: tuple[ast.Assign, ast.Call] | None
    attention: Attention | None

    @property
    def names(self) -> tuple[str, str]:
        """The attributes of the attention that hold the norms."""
        one, other = self.calls
        return called(one), called(other)

    @property
    def calls(self) -> tuple[ast.Call, ast.Call]:
        """The calls of the norms."""
        one, other = self.norms
        return one.call, other.call

    def bypassed(self, parts: Sequence[str]) -> list[tuple[str, str]]:
        """See ``Match``."""
        return [("", name) for name in self.names]

    @property
    def rotate(self) -> str | None:
        """The global name of the function that rotates, None where none does."""
        if self.rotation is None:
            return None
        assert isinstance(self.rotation[1].func, ast.Name)
        return self.rotation[1].func.id

    def decide(self, block: Block, index: int, taken: Set[ast.Call]) -> Site | None:
        """The row of the rotation, where it is fused with the norms before it; None where the norms at most are.

        ``taken``: the calls of norms that are part of another rewrite.
        """
        done = block.applied_parts("heads", index)
        if not taken.isdisjoint(self.calls):
            return None
        if not all(map(block.holds_norm, self.names)) or self._row("qk", block, done is not None).reason is not None:
            return None
        row = None
        if self.rotate is not None:
            row = self._row("rope", block, "rotation" in (done or ()))
            row = unless_unrecognised(row, self.rotate, 4, block)
        fused = row is not None and row.reason is None
        parts = () if self.attention is None else self.attention.parts(block)
        block.rewrites.append(Rewrite("heads", index, ("rotation", *parts) if fused else ()))
        return row if fused else None

    def _row(self, option: Kind, block: Block, already: bool) -> Site:
        """The row of the attention, from those of its norms."""
        rows = [block.norm_row(name, "rope", already, option) for name in self.names]
        row = replace(next((row for row in rows if row.reason is not None), rows[0]), path=block.path)
        weights = [getattr(block.member(name), "weight", None) for name in self.names]
        one, other = (getattr(weight, "ds_shape", getattr(weight, "shape", None)) for weight in weights)
        if not alike(*rows) or one != other:
            row = row.skipped("its q and k norms differ in more than the weight")
        return row

    def edit(self, rewrite: Rewrite, forward: EditedForward) -> None:
        """Put the fused calls in the place of the norms."""
        own, arguments = forward.own, [norm.call.func for norm in self.norms]
        for norm in self.norms:
            forward.replace(norm.call, norm.call.args[0])
        if "rotation" in rewrite.parts:
            assert self.rotation is not None
            statement, rotate = self.rotation
            if self.attention is not None:
                self.attention.edit(rotate, rewrite, forward)
            arguments += [rotate.func, *rotate.args]
            statement.value = make_call(own, "fused_norm_rotated", arguments, rotate.keywords)
            return
        arguments += [ast.Name(norm.name, ast.Load()) for norm in self.norms]
        results: list[ast.expr] = [ast.Name(norm.name, ast.Store()) for norm in self.norms]
        both = ast.Assign([ast.Tuple(results, ast.Store())], make_call(own, "fused_norm_pair", arguments))
        forward.insert_after(self.norms[1].statement, both)


def find_heads(flow: Dataflow, attentions: Mapping[ast.Call, Attention]) -> list[Heads]:
    """The pairs of q and k norms, in order; none that a function inside may read, whenever that is called."""
    return [
        heads
        for body in flow.bodies
        for heads in _heads_in(flow, body, attentions)
        if not flow.is_captured(*(norm.name for norm in heads.norms))
    ]


def _heads_in(flow: Dataflow, body: list[ast.stmt], attentions: Mapping[ast.Call, Attention]) -> Iterator[Heads]:
    first: HeadNorm | None = None
    for statement in body:
        found = _head_norm(statement, flow.own)
        if first is not None and (mentions(statement, first.name) or edits_in_place(statement)):
            first = None
        if first is not None and found is not None and not _writes_input(flow, first, found):
            rotation = _rotation(flow, found.statement, (first.name, found.name))
            attention = None if rotation is None else attentions.get(rotation[1])
            yield Heads((first, found), rotation, attention)
            first = None
        elif found is not None:
            first = found


def _writes_input(flow: Dataflow, first: HeadNorm, second: HeadNorm) -> bool:
    """Return whether what comes after the first norm, and now would come before, may write into what it takes."""
    between = flow.between(first.statement, second.statement) or []
    return flow.may_change(first.call.args[0], [*between, *second.call.args])


def _head_norm(statement: ast.stmt, own: str) -> HeadNorm | None:
    """The norm that a statement computes, where that is all it does, perhaps with ``.transpose(1, 2)``."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(name)],
            value=ast.Call(
                func=ast.Attribute(value, "transpose"), args=[ast.Constant(1), ast.Constant(2)], keywords=[]
            ),
        ):
            call = call_of_own(value, own)
        case ast.Assign(targets=[ast.Name(name)]):
            call = call_of_own(statement.value, own)
        case _:
            return None
    assert isinstance(statement, ast.Assign)
    return HeadNorm(statement, call, name) if call is not None and QK_NAME.fullmatch(called(call)) else None


def _rotation(flow: Dataflow, second: ast.stmt, names: tuple[str, str]) -> tuple[ast.Assign, ast.Call] | None:
    """``q, k = rotate(q, k, cos, sin)``, perhaps with a constant ``unsqueeze_dim``, the first to read q or k."""
    touching = (one for one in flow.after(second) if mentions(one, *names) or edits_in_place(one))
    match next(touching, None):
        case (
            ast.Assign(
                targets=[ast.Tuple([ast.Name(q), ast.Name(k)])],
                value=ast.Call(ast.Name(), [ast.Name(q_given), ast.Name(k_given), *angles], keywords) as call,
            ) as statement
        ) if (q, k) == (q_given, k_given) == names and len(angles) == 2:
            plain = not any(isinstance(argument, ast.Starred) or mentions(argument, *names) for argument in angles)
            if plain and all(one.arg == "unsqueeze_dim" and isinstance(one.value, ast.Constant) for one in keywords):
                return statement, call
    return None
