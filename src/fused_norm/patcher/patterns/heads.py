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

The norm of the last dimension may be computed after leading dimensions are transposed. If no rotation follows directly,
both norms are computed by ``fused_norm_pair`` as soon as both inputs are there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...kernels.qk_norm_rope import QK_NORM
from ...spec import Kind
from ..block import Block, alike
from ..dataflow import Dataflow, edits_in_place, flow_of, mentions
from ..fused_block import Rewrite, runtime
from ..fused_norm_module import spec_and_weights
from ..hooks import runs_as_compared
from ..patch_report import Site
from ..source import global_of
from .attentions import Attention, find_attentions
from .calls import EditedForward, Match, Part, Patterns, call_of_own, callee_name
from .rotations import full_cos_sin, rotation_or_none, unless_unrecognised

QK_NAME = re.compile(r"(q|k|qk|query|key)_?(layer_?)?norm")
"""The names of norms of queries and keys."""


@dataclass(repr=False)
class HeadNorm(Part):
    """The statement ``name = self.<q or k norm>(expression)``, and the call in it."""

    statement: ast.Assign
    call: ast.Call
    name: str


@dataclass(repr=False)
class Heads(Match):
    """The norms of one attention's queries and keys.

    Attributes:
        norms: the two norms, in the order of the source.
        rotation: the call ``rotate(q, k, cos, sin)`` that takes both normed tensors next, and its statement; or None.
        attention: the attention that follows that rotation and alone reads its results, or None.

    The parts of a rewrite are ``rotation``, and with it those of the attention.
    """

    pattern = "heads"

    norms: tuple[HeadNorm, HeadNorm]
    rotation: tuple[ast.Assign, ast.Call] | None
    attention: Attention | None

    @classmethod
    def find(cls, layer: Any, found: Patterns) -> list[Heads]:
        """The pairs of q and k norms, in order, except those whose names an inner function may read."""
        flow = flow_of(layer)
        attentions, pairs = find_attentions(layer), []
        for body in flow.bodies:
            first: HeadNorm | None = None
            for statement in body:
                norm = _head_norm(statement, flow.own)
                if first is not None and (mentions(statement, first.name) or edits_in_place(statement)):
                    first = None
                if norm is None:
                    continue
                # After fusing, the first norm comes after what is between them, and after the argument of the second.
                between = [] if first is None else flow.between(first.statement, statement) or []
                if first is None or flow.may_change(first.call.args[0], [*between, *norm.call.args]):
                    first = norm
                    continue
                if not flow.is_captured(first.name, norm.name):
                    rotation = _rotation(flow, statement, (first.name, norm.name))
                    attention = None if rotation is None else attentions.get(rotation[1])
                    pairs.append(Heads((first, norm), rotation, attention))
                first = None
        return pairs

    @property
    def calls(self) -> list[ast.Call]:
        """The calls of the norms."""
        return [norm.call for norm in self.norms]

    @property
    def names(self) -> list[str]:
        """The attributes of the attention that hold the norms."""
        return [callee_name(call) for call in self.calls]

    def bypassed(self, parts: Sequence[str]) -> list[str]:
        """See ``Match``."""
        return list(self.names)

    def fused_sites(self, parts: Sequence[str]) -> Iterator[tuple[Kind | None, str]]:
        """See ``Match``."""
        for name in self.names:
            yield None, name
            if "rotation" in parts:
                yield "rope", name

    @property
    def rotate(self) -> str | None:
        """The global name of the function that rotates, or None."""
        if self.rotation is None:
            return None
        assert isinstance(self.rotation[1].func, ast.Name)
        return self.rotation[1].func.id

    def norm_calls(self, parts: Sequence[str]) -> list[ast.Call]:
        """See ``Match``."""
        return self.calls

    def functions(self, layer: Any, parts: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """See ``Match``."""
        if self.rotate is not None and "rotation" in parts:
            yield "fused_norm_rotations", rotation_or_none(global_of(layer, self.rotate), 4)

    def decide(self, block: Block, index: int, found: Patterns) -> tuple[()]:
        """Decide whether the norms are fused, and the rotation with them; the row of the rotation says so."""
        if not found.norm_calls(block).isdisjoint(self.calls) or not all(map(block.holds_norm, self.names)):
            return ()
        if self._row("qk", block).reason is None:
            parts: tuple[str, ...] = ()
            if self.rotate is not None and self.rotation_row(block).reason is None:
                parts = ("rotation", *(() if self.attention is None else self.attention.parts(block)))
            what = "qk norms + rope" if parts else "qk norms"
            block.rewrites.append(Rewrite("heads", index, parts, what=what))
        return ()

    def rotation_row(self, block: Block) -> Site:
        """The row of the rotation, as it is fused with the norms before it."""
        assert self.rotate is not None
        row = self._row("rope", block)
        return unless_unrecognised(row, self.rotate, 4, block)

    def _row(self, option: Kind, block: Block) -> Site:
        """The row of the attention, from those of its norms."""
        rows = [block.norm_row(name, "rope", option) for name in self.names]
        row = replace(next((row for row in rows if row.reason is not None), rows[0]), path=block.path)
        weights = [getattr(block.member(name), "weight", None) for name in self.names]
        q_shape, k_shape = (getattr(weight, "ds_shape", getattr(weight, "shape", None)) for weight in weights)
        if not alike(*rows) or q_shape != k_shape:
            row = row.skipped("its q and k norms differ in more than the weight")
        return row

    def edit(self, rewrite: Rewrite, forward: EditedForward) -> None:
        """Replace the norms, and the rotation, by the fused call."""
        (q, k), (q_norm, k_norm) = (norm.name for norm in self.norms), (call.func for call in self.calls)
        for call in self.calls:
            forward.replace(call, call.args[0])
        if "rotation" in rewrite.parts:
            assert self.rotation is not None
            statement, rotate = self.rotation
            if self.attention is not None:
                self.attention.edit_before(rotate, rewrite, forward)
            source = "self.fused_norm_rotated(Q_NORM, K_NORM, ROTATE)"
            fused = forward.code(source, Q_NORM=q_norm, K_NORM=k_norm, ROTATE=rotate.func)
            fused.args, fused.keywords = [*fused.args, *rotate.args], rotate.keywords
            statement.value = fused
        else:
            source = f"{q}, {k} = self.fused_norm_pair(Q_NORM, K_NORM, {q}, {k})"
            forward.insert_after(self.norms[1].statement, forward.code(source, Q_NORM=q_norm, K_NORM=k_norm))


def _head_norm(statement: ast.stmt, own: str) -> HeadNorm | None:
    """The norm that a statement computes, perhaps with ``.transpose(1, 2)``, and nothing else."""
    match statement:
        case ast.Assign(
            [ast.Name(name)],
            ast.Call(ast.Attribute(normed, "transpose"), [ast.Constant(1), ast.Constant(2)], []) | normed,
        ):
            call = call_of_own(normed, own)
            return HeadNorm(statement, call, name) if call and QK_NAME.fullmatch(callee_name(call)) else None
    return None


def _rotation(flow: Dataflow, second: ast.stmt, names: tuple[str, str]) -> tuple[ast.Assign, ast.Call] | None:
    """``q, k = rotate(q, k, cos, sin)``, perhaps with a constant ``unsqueeze_dim``, if it reads q and k first."""
    using = (statement for statement in flow.after(second) if mentions(statement, *names) or edits_in_place(statement))
    match next(using, None):
        case (
            ast.Assign(
                targets=[ast.Tuple([ast.Name(q), ast.Name(k)])],
                value=ast.Call(ast.Name(), [ast.Name(q_given), ast.Name(k_given), *angles], keywords) as call,
            ) as statement
        ) if (q, k) == (q_given, k_given) == names and len(angles) == 2:
            plain = not any(isinstance(argument, ast.Starred) or mentions(argument, *names) for argument in angles)
            if plain and all(word.arg == "unsqueeze_dim" and isinstance(word.value, ast.Constant) for word in keywords):
                return statement, call
    return None


@runtime
def fused_norm_pair(self: Any, q_norm: Any, k_norm: Any, q: Any, k: Any) -> tuple[Any, Any]:
    """``q_norm(q), k_norm(k)``."""
    spec, *weights = spec_and_weights(q_norm, k_norm)
    outputs, reason = QK_NORM.try_fused(q, k, *weights, None, None, spec, 1, None)
    return outputs if reason is None else (q_norm(q), k_norm(k))


@runtime
def fused_norm_rotated(
    self: Any,
    q_norm: Any,
    k_norm: Any,
    rotate: Any,
    q: Any,
    k: Any,
    cos: Any,
    sin: Any,
    *,
    dtype: torch.dtype | None = None,
    **named: Any,
) -> tuple[Any, Any]:
    """``rotate(q_norm(q), k_norm(k), cos, sin)``; ``dtype`` is as in ``fused_norm_rope``."""
    spec, *weights = spec_and_weights(q_norm, k_norm)
    tensors = q, k, *weights
    rotated = *tensors, cos, sin, spec, named.get("unsqueeze_dim", 1), dtype
    for rotation in self.fused_norm_rotations:
        is_alike = rotation.angles is full_cos_sin and not rotation.tokens_first and rotation.layout == "half"
        if is_alike and runs_as_compared(rotate, rotation.function, rotation.running):
            key, unless = rotation.key, rotation.why_unlike_qk_norm
            outputs, reason = QK_NORM.try_fused(*rotated, replaces=key, unless=unless)
            if reason is None:
                return outputs
    outputs, reason = QK_NORM.try_fused(*tensors, None, None, spec, 1, None)
    q, k = outputs if reason is None else (q_norm(q), k_norm(k))
    return self.fused_norm_rope(rotate, q, k, cos, sin, dtype=dtype, **named)
