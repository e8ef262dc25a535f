"""The attention functions that alone read rotated queries and keys, which are asked for the dtype that they read.

Under autocast, transformers' functions for PyTorch's attention and for flash attention cast float32 q and k to 16 bits
before all else. Written in 16 bits at once, they are the same numbers.

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
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.autocast import autocast_dtype, is_any_autocast_on
from ...kernels.plain_calls import dispatch_modes
from ...kernels.switch import modes, switch, why_seen_by_mode
from ..adapters import is_plain_in_4_bits, is_quantised
from ..block import Block
from ..dataflow import Dataflow, flow_of, mentions
from ..four_bit import AdapterInput
from ..fused_block import Rewrite, runtime
from ..hooks import defined_function
from ..source import cached_by_forward
from .calls import EditedForward, Part, call_of_own, callee_name, is_name

HARMLESS = frozenset({"dropout", "scaling", "is_causal", "sliding_window", "softcap"})
"""Arguments of attention functions that do not depend on the dtype of q and k."""

_POSITIONAL = frozenset({"module", "query", "key", "value", "attention_mask", "kwargs"})
_SDPA = "transformers.integrations.sdpa_attention"
_FLASH = "transformers.integrations.flash_attention"
_FLASH_UTILS = "transformers.modeling_flash_attention_utils"


class _Reader(NamedTuple):
    """An attention function that casts q and k under autocast.

    Attributes:
        unless: names of extra arguments with which it does something else first.
        calls: functions that it leaves the cast to: the namespace it looks each up in, the name, the function, and the
            code of the function.
        use_gqa: of PyTorch's attention, what decides that keys are not repeated for the heads that share them; None for
            flash attention, which never repeats them.
    """

    unless: frozenset[str]
    calls: tuple[tuple[Mapping[str, Any], str, Any, Any], ...]
    use_gqa: Callable[..., bool] | None


@runtime
def fused_norm_read_dtype(
    attention: Any, attend: Any, cache: Any, mask: Any, key: Any, value: Any, extra: Any
) -> torch.dtype | None:
    """The dtype of 16 bits that q and k may be written in, in the place of float32; None for their own.

    If there is no value yet, it is that of a value with k's shape, beside q and k in float32.

    Args:
        attention: the module.
        attend: the function ``attend(attention, q, k, value, mask, **extra)`` that nothing but reads them.
        cache: what would keep k, None if nothing does.
        mask: of the attention.
        key: k before its rotation.
        value: the values; None if there are none yet.
        extra: arguments by names that the module's caller has given.
    """
    states = key if value is None else value
    if cache is not None or torch.compiler.is_compiling() or type(states) is not Tensor:
        return None
    dtype = autocast_dtype(states) if is_any_autocast_on() else None
    if dtype is None or dispatch_modes():
        return None
    if (switch.latest_mode is not None or modes()) and why_seen_by_mode():
        return None
    reader = _reader_of(attend, attend.__code__) if type(attend) is FunctionType else None
    if reader is None or not reader.unless.isdisjoint(extra):
        return None
    for namespace, name, expected, code in reader.calls:
        if namespace[name] is not expected or getattr(expected, "__code__", None) is not code:
            return None
    if reader.use_gqa is None:
        # It casts v if q is float32; transformers 4 asks for autocast on CUDA alone.
        casts = states.is_cuda and (value is None or value.dtype is dtype)
    else:
        # Gradients of repeated keys are summed in the dtype of k.
        casts = getattr(attention, "num_key_value_groups", 1) == 1 or (
            mask is None and _is_not_repeated(reader.use_gqa, key.shape[-1], states.shape[-1])
        )
    return dtype if casts and dtype.itemsize == 2 else None


@runtime
def fused_norm_for_values(
    attention: Any, linear: Any, x: Any, attend: Any, cache: Any, mask: Any, key: Any, extra: Any
) -> Any:
    """Return what to call the linear of the values with: x, or x and the 16 bits that attention casts its output to.

    The other arguments are those of ``fused_norm_read_dtype``; k is float32, and has as many numbers as the values.
    """
    if not getattr(linear, "fused_norm_is_quantised", False) or type(key) is not Tensor or key.dtype != torch.float32:
        return x
    adapter_input = x if type(x) is AdapterInput else AdapterInput(x, x, None)
    dtype = fused_norm_read_dtype(attention, attend, cache, mask, key, None, extra)
    if dtype is None or type(adapter_input.x) is not Tensor:
        return x
    if linear.out_features * adapter_input.x.shape[:-1].numel() != key.numel():
        return x
    if adapter_input is not x and not is_plain_in_4_bits(linear):
        return x
    return AdapterInput(adapter_input.x, adapter_input.own, adapter_input.dtype, dtype)


@lru_cache(maxsize=64)
def _is_not_repeated(use_gqa: Callable[..., bool], key: int, value: int) -> bool:
    """Return whether keys and values of such widths are not repeated if there is no mask."""
    arguments = None, torch.empty(1, 1, 1, key), torch.empty(1, 1, 1, value)
    return use_gqa(*arguments[: len(inspect.signature(use_gqa).parameters)])


@lru_cache(maxsize=64)
def _reader_of(attend: FunctionType, code: CodeType) -> _Reader | None:
    """Look up an attention function among those of transformers that cast q and k; None if it is none of them.

    ``code``: what it runs now, which may be swapped; it is a part of what the result is remembered by.
    """
    own: Mapping[str, Any] = attend.__globals__
    calls: list[tuple[Mapping[str, Any], str, Any]]
    if attend is defined_function(_SDPA, "sdpa_attention_forward"):
        names = {"use_gqa_in_sdpa": _SDPA}
        calls = [(vars(torch.nn.functional), "scaled_dot_product_attention", torch._C._nn.scaled_dot_product_attention)]
    elif attend is defined_function(_FLASH, "flash_attention_forward"):
        names = {"_flash_attention_forward": _FLASH_UTILS}
        if "get_target_dtype" in own:  # transformers 4 has no such function, and asks inside
            names["get_target_dtype"] = _FLASH
        utils = vars(sys.modules[_FLASH_UTILS])
        calls = [(utils, "fa_peft_integration_check", defined_function(_FLASH_UTILS, "fa_peft_integration_check"))]
    else:
        return None
    calls += [(own, name, defined_function(module, name)) for name, module in names.items()]
    if any(function is None for _, _, function in calls):
        return None
    unless = frozenset(inspect.signature(attend).parameters) - HARMLESS - _POSITIONAL
    with_code = tuple((*call, getattr(call[2], "__code__", None)) for call in calls)
    return _Reader(unless, with_code, own.get("use_gqa_in_sdpa"))


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
