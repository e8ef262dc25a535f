"""The attention functions that alone read rotated queries and keys: found in a forward's source, and asked for a dtype.

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

before the same ``if`` and call, but that ``dtype`` has no name there. If a LoRA layer around a 4-bit linear computes
the values, the function is looked up before that, too, and

    value = self.v_proj(x).view(shape)

becomes

    value = self.v_proj(self.fused_norm_for_values(self.v_proj, x, attend, cache, mask, key, further)).view(shape)
"""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass
from typing import Any

from ..adapters import is_quantised_lora_layer
from ..attention_functions import HARMLESS
from ..block import Block
from ..dataflow import Dataflow, mentions
from ..rewrite import Rewrite
from .calls import EditedForward, call_of_own, called, is_name, make_call

_REARRANGED = ("view", "reshape", "transpose")
"""Methods between a linear and the attention that leave the values of its output as they are."""


@dataclass
class Attention:
    """The call of an attention function behind a rotation.

    Attributes:
        rotation: the statement ``q, k = rotate(q, k, cos, sin)``.
        lookups: the statements behind it that look the function up, of the module's attributes and of globals.
        function: the function's name.
        asked: the arguments of ``read_dtype`` behind the function.
        values: the statement that computes the values, and the call ``self.<name>(x)`` in it, if nothing else reads
            them and k has a value before; or None.
    """

    rotation: ast.Assign
    lookups: list[ast.stmt]
    function: str
    asked: list[ast.expr]
    values: tuple[ast.Assign, ast.Call] | None

    def parts(self, block: Block) -> tuple[str, ...]:
        """``values`` if a LoRA layer around a 4-bit linear computes them in this module, or nothing."""
        linear: Any = self.values and block.member(called(self.values[1]))
        return ("values",) if is_quantised_lora_layer(linear) else ()

    def edit(self, rotate: ast.Call, rewrite: Rewrite, forward: EditedForward) -> None:
        """Look the function up before the rotation, whose call gets the dtype that it reads as an argument."""
        first = self.rotation
        for statement in self.lookups:
            forward.remove(statement)
        if self.values is not None and "values" in rewrite.parts:
            first, call = self.values
            cache, mask, key, _, further = copy.deepcopy(self.asked)
            given = [
                copy.deepcopy(call.func),
                *call.args,
                ast.Name(self.function, ast.Load()),
                cache,
                mask,
                key,
                further,
            ]
            call.args = [make_call(forward.own, "fused_norm_for_values", given)]
        forward.insert_before(first, *self.lookups)
        asked = [ast.Name(self.function, ast.Load()), *self.asked]
        rotate.keywords.append(ast.keyword("dtype", make_call(forward.own, "fused_norm_read_dtype", asked)))


def find_attentions(flow: Dataflow) -> dict[ast.Call, Attention]:
    """The attentions in a forward, by the calls of the rotations before them."""
    found: dict[ast.Call, Attention] = {}
    for statement in (one for body in flow.bodies for one in body):
        match statement:
            case ast.Assign([ast.Tuple([ast.Name(q), ast.Name(k)])], ast.Call(ast.Name(), [_, _, _, _, *_]) as rotate):
                attention = _attention_behind(flow, statement, q, k)
                if attention is not None:
                    found[rotate] = attention
    return found


def _attention_behind(flow: Dataflow, rotation: ast.Assign, q: str, k: str) -> Attention | None:
    """The attention that directly follows a rotation to q and k, with nothing else reading them; None without one."""
    following = flow.after(rotation)
    cache: ast.expr = ast.Constant(None)
    updates: list[ast.stmt] = []
    match following:
        case [ast.If(ast.Compare(ast.Name() as cache, [ast.IsNot()], [ast.Constant(None)]), orelse=[]) as update, *_]:
            updates = [update]
    rest = following[len(updates) :]
    for count, statement in enumerate(rest):
        call = _attention_call(flow, statement, q, k)
        if call is None:
            continue
        assert isinstance(call.func, ast.Name)
        function, (_, query, key, value, mask) = call.func.id, call.args
        further = next((one.value for one in call.keywords if one.arg is None), ast.Tuple([], ast.Load()))
        asked = [cache, mask, ast.Name(k, ast.Load()), value, further]
        return (
            Attention(rotation, rest[:count], function, asked, _values(flow, rotation, updates, k, value, function))
            if all(_looks_up(flow, one, function) for one in rest[:count])
            and not any(mentions(one, function) for one in (rotation, *updates))
            and all(flow.is_read_by_alone(one, *updates, query, key) for one in flow.made_by(rotation))
            and _is_assigned_before(flow, rotation, value)
            and all(_is_argument(flow, one) for one in (cache, mask, further) if isinstance(one, ast.Name))
            else None
        )
    return None


def _values(
    flow: Dataflow, rotation: ast.Assign, updates: list[ast.stmt], k: str, value: ast.expr, function: str
) -> tuple[ast.Assign, ast.Call] | None:
    """The statement before a rotation that computes the values, after k, and the call of the linear; None if unclear.

    Nothing but the cache and the attention may read them, and the attention function must not be named before.
    """
    assert isinstance(value, ast.Name)
    body = flow.body_of(rotation)
    before = body[: body.index(rotation)]
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
    has_key = any(isinstance(one, ast.Assign) and any(is_name(to, k) for to in one.targets) for one in earlier)
    is_alone = len(statement.targets) == 1 and all(
        flow.is_read_by_alone(one, *updates, value) for one in flow.made_by(statement)
    )
    return (statement, call) if call is not None and has_key and is_alone else None


def _attention_call(flow: Dataflow, statement: ast.stmt, q: str, k: str) -> ast.Call | None:
    """The call ``attend(self, q, k, value, mask, ...)`` whose results a statement assigns; None where it is another."""
    match statement:
        case ast.Assign(
            value=ast.Call(ast.Name(), [ast.Name(instance), ast.Name(query), ast.Name(key), ast.Name(), ast.Name()])
        ) if (instance, query, key) == (flow.own, q, k):
            assert isinstance(statement.value, ast.Call)
            named = [one for one in statement.value.keywords if one.arg not in HARMLESS]
            if not named or [(one.arg, type(one.value)) for one in named] == [(None, ast.Name)]:
                return statement.value
    return None


def _looks_up(flow: Dataflow, statement: ast.stmt, name: str) -> bool:
    """Return whether a statement only gives ``name`` a value, of the module's attributes and of globals."""
    match statement:
        case ast.Assign([ast.Name(target)]) | ast.AnnAssign(ast.Name(target), value=ast.expr()):
            used = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            return target == name and not any(flow.is_local(one) for one in used - {name, flow.own})
        case ast.If(test, body, []):
            used = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
            inside = all(_looks_up(flow, one, name) for one in body)
            return inside and not any(flow.is_local(one) for one in used - {flow.own})
    return False


def _is_assigned_before(flow: Dataflow, rotation: ast.stmt, value: ast.expr) -> bool:
    """Return whether a name has a value at the rotation, given in the same body."""
    assert isinstance(value, ast.Name)
    body = flow.body_of(rotation)
    before = body[: body.index(rotation)]
    return any(isinstance(one, ast.Assign) and any(is_name(to, value.id) for to in one.targets) for one in before)


def _is_argument(flow: Dataflow, name: ast.Name) -> bool:
    """Return whether a name holds an argument of the forward, as it was given."""
    definition = flow.definition_of(name)
    return definition is not None and definition.statement is None
