"""Modules rewritten from their own source: what can be fused in a forward, and the forward with it fused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from .heads import Heads, HeadsRewrite, find_heads, make_together
from .probe import UnrecognisedError
from .rotation import Rotation, recognise_rotation
from .source import compiled, definition_of, self_name
from .stream import Add, AddRewrite, edits_in_place, find_adds, first_norm, hand_over

Rewrite = AddRewrite | HeadsRewrite


@dataclass(frozen=True)
class Patterns:
    """What was found in a forward.

    Attributes:
        adds: the adds of the residual stream that have a norm before or after them, or come last.
        heads: the pairs of q and k norms.
        first_norm: the attribute of the norm that takes the input before anything else does.
        edits_in_place: whether it may write into tensors that it was given or made.
    """

    adds: tuple[Add, ...]
    heads: tuple[Heads, ...]
    first_norm: str | None
    edits_in_place: bool


@cache
def patterns_of(layer: Any) -> Patterns:
    """What can be fused in the forward of a class.

    Raises:
        SourceError: where the source cannot be read, or is not what runs.
    """
    definition, function = definition_of(layer)
    own = self_name(function)
    return Patterns(
        adds=tuple(place.add for place in find_adds(definition, own)),
        heads=tuple(place.heads for place in find_heads(definition, own)),
        first_norm=first_norm(definition, own),
        edits_in_place=edits_in_place(definition),
    )


def rotation_of(layer: Any, name: str) -> Rotation:
    """The rotation that a forward knows by a global name.

    Raises:
        SourceError: where the source cannot be read, or is not what runs.
        UnrecognisedError: where the name stands for something else.
    """
    _, function = definition_of(layer)
    value: Any = function.__globals__.get(name)
    return recognise_rotation(value)


def rotations_of(layer: Any, rewrites: tuple[Rewrite, ...]) -> tuple[Rotation, ...]:
    """The rotations that ``rewrites`` fuse; what is no rotation any more is left out, and called as it is."""
    heads = patterns_of(layer).heads
    found = []
    for rewrite in rewrites:
        name = heads[rewrite.index].rotate if isinstance(rewrite, HeadsRewrite) and rewrite.rotate else None
        with contextlib.suppress(UnrecognisedError):
            found += [rotation_of(layer, name)] if name else []
    return tuple(found)


def rewritten_forward(layer: type[nn.Module], rewrites: tuple[Rewrite, ...]) -> Callable[..., Any]:
    """The forward of a class with these of its patterns fused.

    Raises:
        SourceError: where the forward cannot be rewritten.
    """
    definition, function = definition_of(layer)
    own = self_name(function)
    adds, heads = find_adds(definition, own), find_heads(definition, own)
    for rewrite in rewrites:
        if isinstance(rewrite, AddRewrite):
            hand_over(adds[rewrite.index], rewrite, own)
        else:
            make_together(heads[rewrite.index], rewrite, own)
    return compiled(definition, function, layer)
