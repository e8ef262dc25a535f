"""The attention functions that alone read rotated queries and keys, which are asked for the dtype that they read.

In the forward of an attention,

    query, key = rotate(query, key, cos, sin)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx)
    attend = FUNCTIONS[self.config.attention]
    output, weights = attend(self, query, key, value, mask, scaling=self.scaling, **extra)

becomes, whatever the names are,

    attend = FUNCTIONS[self.config.attention]
    dtype = self.fused_norm_read_dtype(attend, cache, mask, key, value, extra)
    query, key = self.fused_norm_rope(rotate, query, key, cos, sin, dtype=dtype)

before the same ``if`` and call, except that ``dtype`` is an expression without a name. If a LoRA layer around a 4-bit
linear computes the values, the function is looked up before that, too, and

    value = self.v_proj(x).view(shape)

becomes

    value = self.v_proj(self.fused_norm_for_values(self.v_proj, x, attend, cache, mask, key, extra)).view(shape)
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..adapters import is_quantised
from ..attention_functions import HARMLESS
from ..block import Block
from ..dataflow import Dataflow, flow_of, mentions
from ..fused_block import Rewrite
from ..source import cached_by_forward
from .calls import EditedForward, Part, call_of_own, callee_name, is_name

_REARRANGED = ("view", "reshape", "transpose")
"""Methods between a linear and the attention that leave the values of its output as they are."""


@dataclass(repr=False)
class Attention(Part):
    """The call of an attention function after a rotation.

    Attributes:
        rotation: the statement ``q, k = rotate(q, k, cos, sin)``.
        lookups: the statements after it that look the function up, in the module's attributes and in globals.
        function: the function's name.
        arguments: those of ``fused_norm_read_dtype`` after the function.
        values: the statement that computes the values, and the call ``self.<name>(x)`` in it, if nothing else reads
            them and k has a value before; or None.
    """

    rotation: ast.Assign
    lookups: list[ast.stmt]
    function: str
    arguments: list[ast.expr]
    values: tuple[ast.Assign, ast.Call] | None

    def parts(self, block: Block) -> tuple[str, ...]:
        """``values`` if a quantised linear, or a LoRA layer around one, computes them in this module, or nothing."""
        linear: Any = self.values and block.member(callee_name(self.values[1]))
        return ("values",) if is_quantised(linear) else ()

    def edit_before(self, rotate: ast.Call, rewrite: Rewrite, forward: EditedForward) -> None:
        """Look the function up before the rotation, whose call gets the dtype that it reads as an argument."""
        first = self.rotation
        for statement in self.lookups:
            forward.remove(statement)
        if self.values is not None and "values" in rewrite.parts:
            first, call = self.values
            cache, mask, key, _, extra = copy.deepcopy(self.arguments)
            for_values = forward.code(f"self.fused_norm_for_values(LINEAR, {self.function})", LINEAR=call.func)
            linear, attend = for_values.args
            for_values.args = [linear, *call.args, attend, cache, mask, key, extra]
            call.args = [for_values]
        forward.insert_before(first, *self.lookups)
        read_dtype = forward.code(f"self.fused_norm_read_dtype({self.function})")
        read_dtype.args += self.arguments
        rotate.keywords.append(ast.keyword("dtype", read_dtype))


@cached_by_forward
def find_attentions(layer: Any) -> dict[ast.Call, Attention]:
    """The attentions in the forward of a class, by the calls of the rotations before them.

    Raises:
        SourceError: if the source cannot be read, or is not what runs.
    """
    flow, attentions = flow_of(layer), {}
    for statement in flow.body_of:
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
    extra = next((keyword.value for keyword in call.keywords if keyword.arg is None), ast.Tuple([], ast.Load()))
    body = flow.body_of[rotation]
    before = body[: body.index(rotation)]
    assigned = [target for statement in before for target in getattr(statement, "targets", ())]
    if (
        all(_looks_up(flow, statement, function) for statement in lookups)
        and not any(mentions(statement, function) for statement in (rotation, *updates))
        and all(flow.is_read_only_in(definition, *updates, query, key) for definition in flow.made_by(rotation))
        and any(is_name(target, value.id) for target in assigned)
        and all(
            flow.definition_of(name) in flow.arguments.values()  # unchanged
            for name in (cache, mask, extra)
            if isinstance(name, ast.Name)
        )
    ):
        arguments = [cache, mask, ast.Name(k, ast.Load()), value, extra]
        values = _values(flow, before, updates, k, value, function)
        return Attention(rotation, lookups, function, arguments, values)
    return None


def _values(
    flow: Dataflow, before: list[ast.stmt], updates: Sequence[ast.stmt], k: str, value: ast.Name, function: str
) -> tuple[ast.Assign, ast.Call] | None:
    """The statement ``before`` a rotation that computes the values, after k, and the call of the linear, or None.

    Nothing but the cache and the attention may read them, and the attention function must not be named before.
    """
    for statement in reversed(before):
        if mentions(statement, function):
            return None
        if isinstance(statement, ast.Assign) and any(is_name(to, value.id) for to in statement.targets):
            break
    else:
        return None
    node: ast.expr = statement.value
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _REARRANGED:
        node = node.func.value
    call = call_of_own(node, flow.own)
    earlier = before[: before.index(statement)]
    has_key = any(is_name(to, k) for other in earlier for to in getattr(other, "targets", ()))
    is_alone = len(statement.targets) == 1 and all(
        flow.is_read_only_in(definition, *updates, value) for definition in flow.made_by(statement)
    )
    return (statement, call) if call is not None and has_key and is_alone else None


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
