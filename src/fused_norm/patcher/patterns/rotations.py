"""Rotary embeddings: recognised by what they compute, found in a forward, and computed by one kernel.

In the forward of an attention,

    query, key = rotate(query, key, cos, sin)
    query, key = rotate(query, key, cos, sin, positions)
    query = rotate(query, cos, sin, unsqueeze_dim=2)

become, whatever the names are and wherever the calls stand,

    query, key = self.fused_norm_rope(rotate, query, key, cos, sin)
    query, key = self.fused_norm_rope(rotate, query, key, cos, sin, positions)
    query = self.fused_norm_rope_one(rotate, query, cos, sin, unsqueeze_dim=2)

The arguments are evaluated at the same place, and ``rotate`` is looked up at every call.

A function is a rotary embedding if it computes one bit for bit, over pairs of dtypes. It takes cos and sin in one of
several forms: full, half of them, as a table, in sections. A form is a function ``form(angles, *extra_args)``: from cos
or sin, and from what the rotary embedding takes after sin, it makes [batch, tokens, width], which is then unsqueezed at
the dimension of the heads.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.qk_norm_rope import ROPE, rotate_by_angles
from ...kernels.reference import cast_output
from ...kernels.sharded import is_plain
from ...kernels.triton.devices import runs_kernels_on
from ...spec import RotaryLayout
from ..block import Block
from ..dataflow import Conditions, flow_of, may_hold
from ..fused_block import Rewrite, runtime
from ..fused_norm_module import warn_once
from ..hooks import is_function_as_module, runs_as_compared, short_name, stock_class
from ..native_code import native_code
from ..patch_report import Site
from ..probe import DTYPES, Case, Recognizer, UnrecognisedError, found_once, plain_pytorch
from ..running_code import Identity, RunningCode
from ..source import global_of, names_in
from .attentions import Attention, find_attentions
from .calls import EditedForward, Match, Patterns

_PAIRS = (*((dtype, dtype) for dtype in DTYPES), (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
          (torch.float32, torch.bfloat16), (torch.float32, torch.float16))  # fmt: skip
_BATCH, _HEADS, _TOKENS, _WIDTH, _ROTARY, _TABLE = 2, 2, 3, 16, 8, 7

_LAYOUTS: tuple[tuple[RotaryLayout, bool], ...] = (
    ("half", False), ("interleaved", False), ("interleaved", True), ("deinterleaved", False), ("deinterleaved", True)
)  # fmt: skip
"""Layouts, and whether cos and sin have the angles of pairs; with halves they are ``half_cos_sin`` if so."""

_Pairs = tuple[RotaryLayout, bool, bool]
"""A layout, whether angles are those of pairs, and whether nothing but the result is rounded."""

DtypePair = tuple[torch.dtype, torch.dtype]
AngleForm = Callable[..., Tensor]


def full_cos_sin(angles: Tensor, positions: Any = None) -> Tensor:
    """[batch, tokens, width], unchanged; positions are ignored."""
    return angles


def half_cos_sin(angles: Tensor) -> Tensor:
    """[batch, tokens, width / 2], which both halves of a head share."""
    return angles.repeat(*(1,) * (angles.dim() - 1), 2)  # torch.cat refuses 16 bits other than those of autocast


def indexed_cos_sin(angles: Tensor, positions: Any) -> Tensor:
    """The rows of a table [length, width] at positions [batch, tokens]."""
    return angles[positions] if angles.dim() == 2 else angles


def mrope_cos_sin(angles: Tensor, sections: Any) -> Tensor:
    """Sections of [3, batch, tokens, width], alternately of time, height and width (Qwen2-VL)."""
    if angles.dim() != 4:
        return angles
    parts = angles.split(sections * 2, dim=-1)
    return torch.cat([part[index % 3] for index, part in enumerate(parts)], dim=-1)


@dataclass(frozen=True)
class Rotation:
    """A function ``rotate(q, k, cos, sin)`` that computes a rotation of pairs, or ``rotate(x, cos, sin)``.

    Attributes:
        function: the function, or the module that Hugging Face's ``kernels`` makes of it.
        running: the code of the function, or of the module's forward, that was compared.
        arguments: how many it takes by position: 3, 4, or 5 with positions or sections after sin.
        dtypes: pairs of dtypes, of the heads and of cos and sin, for which it rounds as ``rope`` does.
        single_rounding_dtypes: other pairs, for which it computes in fp32 and rounds only the result.
        partial: it also takes cos and sin that are narrower than a head, and leaves the rest of the head unchanged.
        tokens_first: it takes no ``unsqueeze_dim``: heads are [batch, tokens, heads, width] and cos and sin [batch,
            tokens, width]; both, or cos and sin alone, may lack the batch.
        angles: the form of its cos and sin.
        layout: which elements of a head are a pair, see ``rope``.
        angles_by_pair: cos and sin in that form have the angles of pairs in their first halves.
        key: stands for it in the recordings of calls that may replace it.
    """

    function: Any
    running: RunningCode
    arguments: int
    dtypes: tuple[DtypePair, ...]
    single_rounding_dtypes: tuple[DtypePair, ...]
    partial: bool
    tokens_first: bool
    angles: AngleForm
    layout: RotaryLayout
    angles_by_pair: bool
    key: object = field(default_factory=object, init=False, compare=False, repr=False)

    def why_unlike_qk_norm(
        self, q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, spec: Any, heads_dim: int, *options: Any
    ) -> str | None:
        """Why ``QK_NORM`` with these arguments may differ from the norms and this rotation, or None."""
        normed = [torch.promote_types(q.dtype, weight.dtype) for weight in (q_weight, k_weight) if weight is not None]
        return self._unlike((q.dtype, *normed), self.dtypes, q, cos, heads_dim)

    def why_unlike_rope(
        self, q: Any, k: Any, cos: Any, sin: Any, heads_dim: int, single_rounding: bool, *options: Any
    ) -> str | None:
        """Why ``ROPE`` with these arguments may differ from this rotation, or None."""
        compared = self.single_rounding_dtypes if single_rounding else self.dtypes
        return self._unlike((q.dtype,), compared, q, cos, heads_dim)

    def _unlike(
        self, rotated: Sequence[torch.dtype], pairs: Sequence[DtypePair], q: Tensor, cos: Tensor, heads_dim: int
    ) -> str | None:
        """Why such tensors were not compared, or None; ``rotated`` are the dtypes of the heads."""
        compared = (
            cos.dim() == 3
            and cos.shape[1] == q.shape[3 - heads_dim]
            and (cos.shape[2] == q.shape[3] or self.partial)
            and all((dtype, cos.dtype) in pairs for dtype in rotated)
        )
        name = short_name(self.function)
        return None if compared else f"{name} is called with shapes or dtypes that were not compared"


def recognise_rotation(function: Any, arguments: int = 4) -> Rotation:
    """Return the rotation of pairs that a function computes if it is called with so many positional arguments.

    Raises:
        UnrecognisedError: if it computes anything else, or runs code that is not Python over PyTorch.
    """
    if not isinstance(function, FunctionType) and not is_function_as_module(function):
        raise UnrecognisedError(f"the rotation is a {type(function).__name__}, not a function")
    kernel = found_once(lambda: native_code(function), native_code, Identity(function))
    if kernel is not None:  # it may write out of bounds for shapes that it does not expect
        raise UnrecognisedError(f"{short_name(function)} runs {kernel}, which is not tried")
    what = "one tensor" if arguments == 3 else "q and k"
    reason = f"{short_name(function)} does not compute a rotation of pairs of {what}"
    key = recognise_rotation, Identity(function), arguments
    rotation = found_once(lambda: _compare(function, arguments), *key, reason=reason)
    forward = function if isinstance(function, FunctionType) else type(function).forward
    return replace(rotation, function=function, running=RunningCode(forward))


@plain_pytorch()
def _compare(function: Any, arguments: int) -> Rotation:
    """The rotation, without its function and its code."""
    # The forward is called and not the module: no hook may see the samples.
    rotate = partial(type(function).forward, function) if isinstance(function, nn.Module) else function
    tensors = min(arguments - 2, 2)
    forms: list[tuple[AngleForm, bool]] = [(full_cos_sin, False), (half_cos_sin, False), (full_cos_sin, True)]
    if arguments == 5:  # one after sin
        forms = [(indexed_cos_sin, False), (mrope_cos_sin, False), (full_cos_sin, False)]
    for form, tokens_first in forms:
        cases = partial(_cases, rotate, tensors, form, tokens_first, arguments == 5)
        recognizer = Recognizer[_Pairs](cases(_PAIRS[0]), _rotated)
        for layout, by_pair in _LAYOUTS:
            # A function that computes in fp64 shows in fp32 alone.
            if not recognizer.agrees((layout, by_pair, False)):
                continue
            if not Recognizer[_Pairs](cases(_PAIRS[0]), _rotated, gradients=True).agrees((layout, by_pair, False)):
                break
            compared: tuple[list[DtypePair], list[DtypePair]] = [], []
            for dtypes in _PAIRS:
                recognizer = Recognizer[_Pairs](cases(dtypes), _rotated)
                ways = (way for way in (False, True) if recognizer.agrees((layout, by_pair, way)))
                single_rounding = next(ways, None)
                if single_rounding is not None:
                    compared[single_rounding].append(dtypes)
            is_partial = all(
                Recognizer[_Pairs](cases(dtypes, _ROTARY), _rotated).agrees((layout, by_pair, way == 1))
                for way, all_dtypes in enumerate(compared)
                for dtypes in all_dtypes
            )
            if not is_partial and _computes(next(cases(_PAIRS[0], _ROTARY))):
                break  # it rotates another part of a head than the first elements
            facts = tuple(compared[0]), tuple(compared[1]), is_partial, tokens_first, form, layout, by_pair
            return Rotation(None, RunningCode(None), arguments, *facts)
    raise UnrecognisedError


def _computes(case: Case) -> bool:
    """Return whether code takes such arguments."""
    with suppress(Exception):  # foreign code may raise anything
        case.code(*case.args)
        return True
    return False


def _cases(
    function: Callable[..., Any],
    tensors: int,
    form: AngleForm,
    tokens_first: bool,
    takes_extra: bool,
    dtypes: DtypePair,
    rotary: int = _WIDTH,
) -> Iterator[Case]:
    """Calls with so many tensors, in all layouts of the rotary embedding; formulas take cos and sin.

    No other form makes the same angles of these cos, sin and extra arguments.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = dtypes[1]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)

    def called(angles: tuple[Any, ...], named: dict[str, int], *heads: Tensor) -> Any:
        return function(*heads, *angles, **named)

    heads = [random(_BATCH, number, _TOKENS, _WIDTH, dtype=dtypes[0]) for number in (_HEADS, 1)[:tensors]]
    transposed, half = [x.transpose(1, 2) for x in heads], rotary // 2
    for batch in (_BATCH, 1):
        positions = torch.arange(batch * _TOKENS).view(batch, _TOKENS) * 3 % _TABLE
        shape: tuple[int, ...] = batch, _TOKENS, half if form is half_cos_sin else rotary
        extra_args: list[tuple[Any, ...]] = [()]
        if form is indexed_cos_sin:
            shape, extra_args = (_TABLE, rotary), [(positions,)]
        elif form is mrope_cos_sin:
            shape, extra_args = (3, *shape), [([half - 2, 1, 1],), ([1, 2, half - 3],)]
        elif takes_extra:
            extra_args = [(None,), (positions,)]
        for extra in extra_args:
            cos, sin = random(*shape), random(*shape)
            calls: list[tuple[list[Tensor], tuple[Any, ...], int, dict[str, int]]]
            if tokens_first:
                unbatched = cos[0], sin[0]
                calls = [
                    (transposed, (cos, sin), 2, {}),
                    (transposed, unbatched, 1, {}),
                    ([x[0] for x in transposed], unbatched, 1, {}),
                ]
            else:
                calls = [(heads, (cos, sin), 1, {}), (transposed, (cos, sin), 2, {"unsqueeze_dim": 2})]
            for inputs, angles, heads_dim, named in calls:
                yield Case(
                    partial(called, (*angles, *extra), named),
                    inputs,
                    tuple(form(angle, *extra).unsqueeze(heads_dim) for angle in angles),
                )


def _rotated(how: _Pairs, cos: Tensor, sin: Tensor, *heads: Tensor) -> Any:
    """The rotation of one tensor, or of each of two."""
    layout, by_pair, single_rounding = how
    turned = tuple(rotate_by_angles(x, cos, sin, single_rounding, layout, by_pair) for x in heads)
    return turned if len(turned) > 1 else turned[0]


ROTATION_NAME = re.compile(r"(?<![a-z])(rot|rope)", re.IGNORECASE)
"""Part of the names of rotary embeddings: ``apply_rotary_pos_emb``, ``rotate_half_of_queries``, ``apply_rope``."""

_ARGUMENTS = (3, 4, 5)
"""How many positional arguments calls have that can be fused: x, cos, sin; q, k, cos, sin; and one more."""


@dataclass(repr=False)
class RotationCall(Match):
    """A call of a rotary embedding.

    Attributes:
        call: the call.
        heads: the index of the q and k norms whose results it takes next, or None.
        attention: the attention that alone reads its results, or None.
        conditions: those on settings of the module under which it is called.

    The parts of a rewrite are those of the attention.
    """

    pattern, kind, is_named = "rotations", "rope", True

    call: ast.Call
    heads: int | None
    attention: Attention | None
    conditions: Conditions

    @classmethod
    def find(cls, layer: Any, found: Patterns) -> list[RotationCall]:
        """The calls of rotary embeddings, by name, and any calls that follow norms of queries and keys."""
        flow, attentions, rotations = flow_of(layer), find_attentions(layer), []
        after = {pair.rotation[1]: index for index, pair in enumerate(found.heads) if pair.rotation is not None}
        for call in ast.walk(flow.definition):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                named = {word.arg for word in call.keywords}
                takes_angles = len(call.args) >= min(_ARGUMENTS) or {"cos", "sin"} <= named
                if call in after or (takes_angles and ROTATION_NAME.search(call.func.id)):
                    rotations.append(cls(call, after.get(call), attentions.get(call), flow.conditions(call)))
        return rotations

    @classmethod
    def may_be_in(cls, module: nn.Module) -> bool:
        """Return whether a module's forward uses the name of a rotary embedding of its file."""
        origin = stock_class(module)
        return any(ROTATION_NAME.search(name) and global_of(origin, name) is not None for name in names_in(origin))

    @property
    def rotate(self) -> str:
        """The global name of the function."""
        assert isinstance(self.call.func, ast.Name)
        return self.call.func.id

    @property
    def arguments(self) -> int:
        """The number of its positional arguments; 0 if it takes others than can be fused."""
        is_starred = any(isinstance(argument, ast.Starred) for argument in self.call.args)
        is_plain = not is_starred and all(keyword.arg == "unsqueeze_dim" for keyword in self.call.keywords)
        return len(self.call.args) if is_plain and len(self.call.args) in _ARGUMENTS else 0

    def functions(self, layer: Any, parts: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """See ``Match``."""
        yield "fused_norm_rotations", rotation_or_none(global_of(layer, self.rotate), self.arguments)

    def decide(self, block: Block, index: int, found: Patterns) -> Iterator[Site]:
        """The row of the rotation, unless the module's settings never call it; it may be fused with norms before it."""
        of_heads = [rewrite for rewrite in block.rewrites if (rewrite.pattern, rewrite.index) == ("heads", self.heads)]
        if any("rotation" in rewrite.parts for rewrite in of_heads):
            row = found.heads[self.heads].rotation_row(block)
        else:
            row = block.own_row("rope")
            row = unless_unrecognised(row, self.rotate, self.arguments, block)
            parts = () if self.attention is None else self.attention.parts(block)
            block.rewrites += [Rewrite("rotations", index, parts, what="rope")] if row.reason is None else []
        if may_hold(self.conditions, block.module):
            yield row

    def edit(self, rewrite: Rewrite, forward: EditedForward) -> None:
        """Replace the call by the fused call."""
        method = "fused_norm_rope_one" if self.arguments == 3 else "fused_norm_rope"
        if self.attention is not None:
            self.attention.edit_before(self.call, rewrite, forward)
        self.call.args.insert(0, self.call.func)
        self.call.func = forward.code(f"self.{method}")


def rotation_or_none(function: Any, arguments: int) -> Rotation | None:
    """The rotation that a function computes now, or None."""
    try:
        return recognise_rotation(function, arguments)
    except UnrecognisedError:
        return None


def unless_unrecognised(row: Site, rotate: str, arguments: int, block: Block) -> Site:
    """``row``, or one with the reason why a call of ``rotate`` with so many arguments is not fused."""
    if row.reason is not None:
        return row
    if not arguments:
        return row.skipped(f"{rotate} takes other arguments than q, k, cos, sin")
    function = global_of(block.origin, rotate)
    try:
        recognise_rotation(function, arguments)
    except UnrecognisedError as error:
        if isinstance(function, nn.Module):  # with another forward bound to it, as `kernelize` does
            function = getattr(vars(function).get("forward"), "__func__", None)
        package = block.origin.__module__.partition(".")[0]
        if isinstance(function, FunctionType) and function.__module__.partition(".")[0] != package:
            owner = f"{function.__module__}.{function.__qualname__}"
            row = row.skipped(f"{rotate} was replaced, by {owner}", "overridden")
        return row.skipped(str(error))
    return row


@runtime
def fused_norm_rope(
    self: Any,
    rotate: Any,
    q: Any,
    k: Any,
    cos: Any,
    sin: Any,
    *extra: Any,
    dtype: torch.dtype | None = None,
    **named: Any,
) -> tuple[Any, Any]:
    """``rotate(q, k, cos, sin, *extra)``; in ``dtype``, if given, in place of float32."""
    rotated: Any = _fused_rotation(self, rotate, (q, k), (cos, sin, *extra), named, dtype)
    if rotated is None:
        rotated = rotate(q, k, cos, sin, *extra, **named)
        if dtype is not None:
            rotated = tuple([cast_output(x, dtype) for x in rotated])
    return rotated


@runtime
def fused_norm_rope_one(self: Any, rotate: Any, x: Any, cos: Any, sin: Any, **named: Any) -> Any:
    """``rotate(x, cos, sin)``."""
    rotated = _fused_rotation(self, rotate, (x, None), (cos, sin), named, None)
    return rotate(x, cos, sin, **named) if rotated is None else rotated[0]


def _fused_rotation(
    self: Any, rotate: Any, heads: tuple[Any, Any], angles: tuple[Any, ...], named: dict[str, Any], dtype: Any
) -> tuple[Tensor, Tensor | None] | None:
    """q and k rotated by the kernel; None if it may not take them.

    ``angles``: cos, sin, and what tells more of them.
    """
    (q, k), (cos, sin, *extra) = heads, angles
    arguments = (1 if k is None else 2) + len(angles)
    for rotation in self.fused_norm_rotations:
        is_alike = rotation.arguments == arguments and not (rotation.tokens_first and named)
        if is_alike and runs_as_compared(rotate, rotation.function, rotation.running):
            break
    else:
        return None
    if rotation.angles is not full_cos_sin and isinstance(q, Tensor) and runs_kernels_on(q):
        if not all(map(is_plain, (q, cos, sin))):
            what = f"{short_name(rotation.function)} is called with tensors of other kinds than the kernel takes"
            warn_once(self.fused_norm_origin, what)
            return None
        cos, sin = rotation.angles(cos, *extra), rotation.angles(sin, *extra)
    heads_dim = named.get("unsqueeze_dim", 1)
    if rotation.tokens_first:
        heads, heads_dim = (_with_batch(q, 3), _with_batch(k, 3)), 2
        cos, sin = _with_batch(cos, 2), _with_batch(sin, 2)
    single = bool(rotation.single_rounding_dtypes) and (
        (getattr(q, "dtype", None), getattr(cos, "dtype", None)) in rotation.single_rounding_dtypes
    )
    options = heads_dim, single, rotation.layout, rotation.angles_by_pair, dtype
    outputs, reason = ROPE.try_fused(*heads, cos, sin, *options, replaces=rotation.key, unless=rotation.why_unlike_rope)
    if reason is not None:
        warn_once(self.fused_norm_origin, reason)
    if outputs is None or not rotation.tokens_first:
        return outputs
    return _like(outputs[0], q), None if k is None else _like(outputs[1], k)


def _with_batch(x: Any, without: int) -> Any:
    """A tensor of so many dimensions with one of the batch in front; anything else as it is."""
    return x.unsqueeze(0) if isinstance(x, Tensor) and x.dim() == without else x


def _like(x: Tensor, other: Tensor) -> Tensor:
    """``x`` without the dimension of the batch if ``other`` has none."""
    return x if x.dim() == other.dim() else x.squeeze(0)
