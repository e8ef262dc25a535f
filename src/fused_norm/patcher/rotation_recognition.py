"""The recognition of a rotary embedding by what it computes, bit for bit, over pairs of dtypes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import reference
from .fused_norm_module import has_hooks
from .norm_recognition import UnrecognisedError
from .rotation_angles import FORMS, AngleForm, Sample, of_each_element, samples

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PAIRS = (*((dtype, dtype) for dtype in _DTYPES), (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
          (torch.float32, torch.bfloat16), (torch.float32, torch.float16))  # fmt: skip
_BATCH, _HEADS, _TOKENS, _WIDTH, _ROTARY = 2, 2, 3, 16, 8

DtypePair = tuple[torch.dtype, torch.dtype]


@dataclass(frozen=True)
class Rotation:
    """A function ``rotate(q, k, cos, sin)`` that makes the half rotation, or ``rotate(x, cos, sin)``.

    Attributes:
        function: the function, or the module that Hugging Face's ``kernels`` makes of it where it is installed.
        arguments: how many it takes by position: 3, 4, or 5 where something comes after sin that tells the angles.
        dtypes: pairs of dtypes, of the heads and of cos and sin, for which it rounds as the half rotation does.
        dtypes_once: further pairs, for which it computes in fp32 and rounds nothing but the result.
        partial: it takes cos and sin narrower than a head, and leaves the rest of the head as it is.
        tokens_first: it takes no ``unsqueeze_dim``: heads are [batch, tokens, heads, width] and cos and sin [batch,
            tokens, width], the latter or both of them perhaps without the batch.
        angles: the form of its cos and sin.
    """

    function: Any
    arguments: int
    dtypes: tuple[DtypePair, ...]
    dtypes_once: tuple[DtypePair, ...]
    partial: bool
    tokens_first: bool
    angles: AngleForm

    def is_now(self, value: Any) -> bool:
        """Return whether ``value`` is this rotation, and no hook or other code would see it called."""
        return value is self.function and (
            type(value) is FunctionType or (_runs_its_own_forward(value) and not has_hooks(value))
        )


def recognise_rotation(function: Any, arguments: int = 4) -> Rotation:
    """Return what is known of a rotary embedding that computes the half rotation, called with so many arguments.

    Raises:
        UnrecognisedError: where it is another function than the half rotation.
    """
    if not isinstance(function, FunctionType) and not _is_function_as_module(function):
        raise UnrecognisedError(f"the rotation is a {type(function).__name__}, not a function")
    rotation = _recognise(function, arguments)
    if rotation is None:
        what = "one tensor" if arguments == 3 else "q and k"
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


@cache
def _recognise(function: Any, arguments: int) -> Rotation | None:
    # No hook is to see the samples.
    rotate = partial(type(function).forward, function) if isinstance(function, nn.Module) else function
    tensors = min(arguments - 2, 2)
    forms = [(form, False) for form in FORMS[arguments - 2 - tensors]]
    if arguments <= 4:
        forms.append((of_each_element, True))
    for form, tokens_first in forms:
        found: tuple[list[DtypePair], list[DtypePair]] = [], []
        agrees = partial(_agrees, rotate, tensors, form, tokens_first)
        for pair in _PAIRS:
            once = next((one for one in (False, True) if agrees(pair, one)), None)
            if once is not None:
                found[once].append(pair)
        if _PAIRS[0] in found[0] and agrees(_PAIRS[0], once=False, gradients=True):
            # A function that computes in fp64 shows in fp32 alone.
            partial_too = all(agrees(pair, once == 1, _ROTARY) for once, pairs in enumerate(found) for pair in pairs)
            return Rotation(function, arguments, tuple(found[0]), tuple(found[1]), partial_too, tokens_first, form)
    return None


def _agrees(
    function: Callable[..., Any],
    tensors: int,
    form: AngleForm,
    tokens_first: bool,
    dtypes: DtypePair,
    once: bool,
    rotary: int = _WIDTH,
    gradients: bool = False,
) -> bool:
    """Return whether a function gives the bits of the half rotation of so many tensors, in every layout that it has.

    ``gradients``: those of the half rotation too, up to rounding.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = dtypes[1]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)

    cpu, exact = torch.device("cpu"), torch.autocast("cpu", enabled=False)
    with cpu, exact, torch.inference_mode(False), torch.set_grad_enabled(gradients):
        heads = [random(_BATCH, number, _TOKENS, _WIDTH, dtype=dtypes[0]) for number in (_HEADS, 1)[:tensors]]
        heads = [x.requires_grad_(gradients) for x in heads]
        turned = [x.transpose(1, 2) for x in heads]
        calls: list[tuple[list[Tensor], Sample, int, dict[str, int]]] = []
        for cos, sin, further in samples(form, (_BATCH, 1), _TOKENS, rotary, random):
            angles = cos, sin, further
            if tokens_first:
                alike = cos[0], sin[0], further
                calls += [(turned, angles, 2, {}), (turned, alike, 1, {}), ([x[0] for x in turned], alike, 1, {})]
            else:
                calls += [(heads, angles, 1, {}), (turned, angles, 2, {"unsqueeze_dim": 2})]
        for given, (cos, sin, further), heads_dim, named in calls:
            try:
                rotated = function(*given, cos, sin, *further, **named)
            except Exception:  # a foreign function may raise anything
                return False
            if tensors == 1:
                rotated = (rotated,)
            if not isinstance(rotated, tuple) or len(rotated) != tensors:
                return False
            cos, sin = (form(one, *further).unsqueeze(heads_dim) for one in (cos, sin))
            expected = [reference.rope(x, cos, sin, once) for x in given]
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
