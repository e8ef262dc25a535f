"""The attention functions that alone read rotated queries and keys, which are asked for the dtype that they read.

In the forward of an attention,

    query, key = rotate(query, key, cos, sin)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx)
    attend = FUNCTIONS[self.config.attention]
    output, weights = attend(self, query, key, value, mask, scaling=self.scaling, **further)

becomes, whatever the names are,

    attend = FUNCTIONS[self.config.attention]
    dtype = self.fused_norm_read_dtype(attend, cache, mask, key, value, further)
    query, key = self.fused_norm_rope(rotate, query, key, cos, sin, dtype=dtype)

before the same ``if`` and call, except that ``dtype`` is an expression without a name.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from ..attention_functions import HARMLESS
from ..dataflow import Dataflow, mentions
from .calls import EditedForward, Match, is_name


@dataclass(repr=False)
class Attention(Match):
    """The call of an attention function after a rotation.

    Attributes:
        rotation: the statement ``q, k = rotate(q, k, cos, sin)``.
        lookups: the statements after it that look the function up, in the module's attributes and in globals.
        function: the function's name.
        asked: the arguments of ``fused_norm_read_dtype`` after the function.
    """

    rotation: ast.Assign
    lookups: list[ast.stmt]
    function: str
    asked: list[ast.expr]

    def edit_before(self, rotate: ast.Call, forward: EditedForward) -> None:
        """Look the function up before the rotation, whose call gets the dtype that it reads as an argument."""
        for statement in self.lookups:
            forward.remove(statement)
        forward.insert_before(self.rotation, *self.lookups)
        read_dtype = forward.code(f"self.fused_norm_read_dtype({self.function})")
        read_dtype.args += self.asked
        rotate.keywords.append(ast.keyword("dtype", read_dtype))


def find_attentions(flow: Dataflow) -> dict[ast.Call, Attention]:
    """The attentions in a forward, by the calls of the rotations before them."""
    attentions = {}
    for statement in (statement for body in flow.bodies for statement in body):
        match statement:
            case ast.Assign([ast.Tuple([ast.Name(q), ast.Name(k)])], ast.Call(ast.Name(), [_, _, _, _, *_]) as rotate):
                if (attention := _attention_after(flow, statement, q, k)) is not None:
                    attentions[rotate] = attention
    return attentions


def _attention_after(flow: Dataflow, rotation: ast.Assign, q: str, k: str) -> Attention | None:
    """The attention that directly follows a rotation to q and k, if nothing else reads them; else None."""
    rest, updates = flow.after(rotation), []
    cache: ast.expr = ast.Constant(None)
    match rest:
        case [ast.If(ast.Compare(ast.Name() as cache, [ast.IsNot()], [ast.Constant(None)]), orelse=[]) as update, *_]:
            updates, rest = [update], rest[1:]
    calls = [_attention_call(flow, statement, q, k) for statement in rest]
    call = next(filter(None, calls), None)
    if call is None:
        return None
    assert isinstance(call.func, ast.Name)
    function, lookups, (_, query, key, value, mask) = call.func.id, rest[: calls.index(call)], call.args
    assert isinstance(value, ast.Name)
    further = next((keyword.value for keyword in call.keywords if keyword.arg is None), ast.Tuple([], ast.Load()))
    body = flow.body_of(rotation)
    assigned = [target for statement in body[: body.index(rotation)] for target in getattr(statement, "targets", ())]
    if (
        all(_looks_up(flow, statement, function) for statement in lookups)
        and not any(mentions(statement, function) for statement in (rotation, *updates))
        and all(flow.is_read_only_in(made, *updates, query, key) for made in flow.made_by(rotation))
        and any(is_name(target, value.id) for target in assigned)
        and all(_is_argument(flow, name) for name in (cache, mask, further) if isinstance(name, ast.Name))
    ):
        return Attention(rotation, lookups, function, [cache, mask, ast.Name(k, ast.Load()), value, further])
    return None


def _attention_call(flow: Dataflow, statement: ast.stmt, q: str, k: str) -> ast.Call | None:
    """The call ``attend(self, q, k, value, mask, ...)`` whose results a statement assigns, or None."""
    match statement:
        case ast.Assign(
            value=ast.Call(ast.Name(), [ast.Name(instance), ast.Name(query), ast.Name(key), ast.Name(), ast.Name()])
        ) if (instance, query, key) == (flow.own, q, k):
            assert isinstance(statement.value, ast.Call)
            others = [(keyword.arg, type(keyword.value)) for keyword in statement.value.keywords]
            others = [(name, kind) for name, kind in others if name not in HARMLESS]
            if not others or others == [(None, ast.Name)]:
                return statement.value
    return None


def _looks_up(flow: Dataflow, statement: ast.stmt, name: str) -> bool:
    """Return whether a statement only gives ``name`` a value, from the module's attributes and globals."""

    def uses_only(node: ast.AST, *names: str) -> bool:
        used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        return not any(flow.is_local(other) for other in used.difference(names))

    match statement:
        case ast.Assign([ast.Name(target)]) | ast.AnnAssign(ast.Name(target), value=ast.expr()):
            return target == name and uses_only(statement, name, flow.own)
        case ast.If(test, body, []):
            return uses_only(test, flow.own) and all(_looks_up(flow, inner, name) for inner in body)
    return False


def _is_argument(flow: Dataflow, name: ast.Name) -> bool:
    """Return whether a name holds an argument of the forward, unchanged."""
    definition = flow.definition_of(name)
    return definition is not None and definition.statement is None
