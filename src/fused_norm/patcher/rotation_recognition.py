"""The recognition of a rotary embedding by what it computes, bit for bit, over pairs of dtypes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels import reference
from .fused_norm_module import has_hooks
from .norm_recognition import UnrecognisedError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PAIRS = (*((dtype, dtype) for dtype in _DTYPES), (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
          (torch.float32, torch.bfloat16), (torch.float32, torch.float16))  # fmt: skip
_HEADS, _TOKENS, _WIDTH, _ROTARY = 2, 3, 16, 8


DtypePair = tuple[torch.dtype, torch.dtype]


@dataclass(frozen=True)
class Rotation:
    """A function ``rotate(q, k, cos, sin, unsqueeze_dim=1)`` that makes the half rotation, or ``rotate(x, cos, sin)``.

    Attributes:
        function: the function, or the module that Hugging Face's ``kernels`` makes of it where it is installed.
        dtypes: pairs of dtypes, of the heads and of cos and sin, for which it rounds as the half rotation does.
        dtypes_once: further pairs, for which it computes in fp32 and rounds nothing but the result.
        partial: it takes cos and sin narrower than a head, and leaves the rest of the head as it is.
        tokens_first: it takes no ``unsqueeze_dim``: heads are [batch, tokens, heads, width] and cos and sin [batch,
            tokens, width], the latter or both of them perhaps without the batch.
        halved: its cos and sin are those of one half of a head, which both halves share.
    """

    function: Any
    dtypes: tuple[DtypePair, ...]
    dtypes_once: tuple[DtypePair, ...]
    partial: bool
    tokens_first: bool
    halved: bool

    def is_now(self, value: Any) -> bool:
        """Return whether ``value`` is this rotation, and no hook or other code would see it called."""
        return value is self.function and (
            type(value) is FunctionType or (_runs_its_own_forward(value) and not has_hooks(value))
        )


def recognise_rotation(function: Any, tensors: int = 2) -> Rotation:
    """Return what is known of a rotary embedding that computes the half rotation of so many tensors, one or two.

    Raises:
        UnrecognisedError: where it is another function than the half rotation.
    """
    if not isinstance(function, FunctionType) and not _is_function_as_module(function):
        raise UnrecognisedError(f"the rotation is a {type(function).__name__}, not a function")
    rotation = _recognise(function, tensors)
    if rotation is None:
        what = "q and k" if tensors == 2 else "one tensor"
        raise UnrecognisedError(f"{name_of(function)} does not compute the half rotation of {what}")
    return rotation


def name_of(rotation: Any) -> str:
    """The name of a rotation's function, or of the module's class."""
    return getattr(rotation, "__name__", type(rotation).__name__)


def _is_function_as_module(value: Any) -> bool:
    return isinstance(value, nn.Module) and next(value.parameters(), None) is None and _runs_its_own_forward(value)


def _runs_its_own_forward(module: nn.Module) -> bool:
    """Return whether a module's forward is its class's; ``kernelize`` binds even that to the instance."""
    forward = vars(module).get("forward")
    return forward is None or getattr(forward, "__func__", None) is type(module).forward


class _Form(NamedTuple):
    """The form in which a function takes heads and angles, as in ``Rotation``."""

    tokens_first: bool = False
    halved: bool = False


@cache
def _recognise(function: Any, tensors: int) -> Rotation | None:
    # No hook is to see the samples.
    rotate = partial(type(function).forward, function) if isinstance(function, nn.Module) else function
    for form in (_Form(), _Form(tokens_first=True), _Form(halved=True)):
        found: tuple[list[DtypePair], list[DtypePair]] = [], []
        for pair in _PAIRS:
            once = next((one for one in (False, True) if _agrees(rotate, tensors, pair, form, one)), None)
            if once is not None:
                found[once].append(pair)
        if _PAIRS[0] in found[0] and _agrees(rotate, tensors, _PAIRS[0], form, once=False, gradients=True):
            # A function that computes in fp64 shows in fp32 alone.
            partial_too = all(
                _agrees(rotate, tensors, pair, form, once == 1, _ROTARY)
                for once, pairs in enumerate(found)
                for pair in pairs
            )
            return Rotation(function, tuple(found[0]), tuple(found[1]), partial_too, form.tokens_first, form.halved)
    return None


def _agrees(
    function: Callable[..., Any],
    tensors: int,
    dtypes: DtypePair,
    form: _Form,
    once: bool,
    rotary: int = _WIDTH,
    gradients: bool = False,
) -> bool:
    """Return whether a function gives the bits of the half rotation of so many tensors, in every layout that it has.

    ``gradients``: those of the half rotation too, up to rounding.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    cpu, exact = torch.device("cpu"), torch.autocast("cpu", enabled=False)
    with cpu, exact, torch.inference_mode(False), torch.set_grad_enabled(gradients):
        heads = [random(2, number, _TOKENS, _WIDTH).to(dtypes[0]) for number in (_HEADS, 1)[:tensors]]
        heads = [x.requires_grad_(gradients) for x in heads]
        angles = [random(2, _TOKENS, rotary).to(dtypes[1]) for _ in range(2)]
        if form.halved:
            angles = [angle[..., : rotary // 2].repeat(1, 1, 2) for angle in angles]
        turned = [x.transpose(1, 2) for x in heads]
        calls: list[tuple[list[Tensor], list[Tensor], int, dict[str, int]]]
        calls = [(heads, angles, 1, {}), (turned, angles, 2, {"unsqueeze_dim": 2})]
        calls.append((heads, [angle[:1] for angle in angles], 1, {}))
        if form.tokens_first:
            alike = [angle[0] for angle in angles]
            calls = [(turned, angles, 2, {}), (turned, alike, 1, {}), ([x[0] for x in turned], alike, 1, {})]
        for given, (cos, sin), heads_dim, named in calls:
            width = rotary // 2 if form.halved else rotary
            try:
                rotated = function(*given, cos[..., :width], sin[..., :width], **named)
            except Exception:  # a foreign function may raise anything
                return False
            if tensors == 1:
                rotated = (rotated,)
            if not isinstance(rotated, tuple) or len(rotated) != tensors:
                return False
            expected = [reference.rope(x, cos.unsqueeze(heads_dim), sin.unsqueeze(heads_dim), once) for x in given]
            for actual, wanted in zip(rotated, expected, strict=True):
                if not isinstance(actual, Tensor) or actual.dtype != wanted.dtype or not torch.equal(actual, wanted):
                    return False
                if gradients and not _alike_in_gradients(actual, wanted, heads):
                    return False
    return True


def _alike_in_gradients(actual: Tensor, wanted: Tensor, heads: list[Tensor]) -> bool:
    """Return whether two results have one gradient with respect to the heads."""
    if not actual.requires_grad:
        return False
    dy = torch.linspace(-1, 2, wanted.numel(), dtype=torch.float32).view_as(wanted)
    both = (torch.autograd.grad(y, heads, dy, retain_graph=True, materialize_grads=True) for y in (actual, wanted))
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in zip(*both, strict=True))
