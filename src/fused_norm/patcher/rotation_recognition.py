"""The recognition of a rotary embedding by what it computes, bit for bit, over pairs of dtypes.

Rotary embeddings take cos and sin in several forms: full, half of them, as a table, in sections. A form is a function
``form(angles, *extra_args)``: from cos or sin, and from what the rotary embedding takes after sin, it makes
[batch, tokens, width], which is then unsqueezed at the dimension of the heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import reference
from ..spec import RotaryLayout
from .hooks import is_function_as_module, short_name
from .native_code import native_code
from .probe import DTYPES, Case, Recognizer, UnrecognisedError, found_once, plain_pytorch
from .running_code import Identity, RunningCode

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

    def unlike_qk_norm(
        self, q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, spec: Any, heads_dim: int, *options: Any
    ) -> str | None:
        """Why ``QK_NORM`` with these arguments may differ from the norms and this rotation, or None."""
        normed = [torch.promote_types(q.dtype, weight.dtype) for weight in (q_weight, k_weight) if weight is not None]
        return self._unlike((q.dtype, *normed), self.dtypes, q, cos, heads_dim)

    def unlike_rope(
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


def _compare(function: Any, arguments: int) -> Rotation:
    """The rotation, without its function and its code."""
    # A forward is called by itself: no hook may see the samples.
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
    with plain_pytorch(), suppress(Exception):  # foreign code may raise anything
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
    rotated = tuple(reference.rope(x, cos, sin, single_rounding, layout, by_pair) for x in heads)
    return rotated if len(rotated) > 1 else rotated[0]
