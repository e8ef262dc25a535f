"""A module's forward rewritten from its own source: the patterns found in it, and the forward with them fused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from .forward_source import compiled, definition_of, self_name
from .norm_recognition import UnrecognisedError
from .query_key_norms import Pair, PairRewrite, find_pairs, fuse_pair
from .residual_adds import Add, AddRewrite, find_adds, fuse_add
from .rotation_recognition import Rotation, recognise_rotation

Rewrite = AddRewrite | PairRewrite


@dataclass(frozen=True)
class Patterns:
    """The patterns found in a forward: residual adds with a norm before or after them, and pairs of q and k norms."""

    adds: tuple[Add, ...]
    pairs: tuple[Pair, ...]


def patterns_of(layer: Any) -> Patterns:
    """The patterns in the forward that a class has now.

    Raises:
        SourceError: where the source cannot be read, or is not what runs.
    """
    return _patterns_of(layer, layer.forward)


@cache
def _patterns_of(layer: Any, forward: Callable[..., Any]) -> Patterns:
    definition, function, _ = definition_of(layer)
    own = self_name(function)
    return Patterns(
        adds=tuple(place.add for place in find_adds(definition, own)),
        pairs=tuple(place.pair for place in find_pairs(definition, own)),
    )


def rotation_of(layer: Any, name: str) -> Rotation:
    """The rotation that a forward calls by this global name.

    Raises:
        SourceError: where the source cannot be read, or is not what runs.
        UnrecognisedError: where the name stands for something else.
    """
    _, function, _ = definition_of(layer)
    value: Any = function.__globals__.get(name)
    return recognise_rotation(value)


def rotations_of(layer: Any, rewrites: tuple[Rewrite, ...]) -> tuple[Rotation, ...]:
    """The rotations that ``rewrites`` fuse; one that is no longer a rotation is left out, and called as it is."""
    pairs = patterns_of(layer).pairs
    found = []
    for rewrite in rewrites:
        name = pairs[rewrite.index].rotate if isinstance(rewrite, PairRewrite) and rewrite.rotate else None
        with contextlib.suppress(UnrecognisedError):
            found += [rotation_of(layer, name)] if name else []
    return tuple(found)


def rewritten_forward(layer: type[nn.Module], rewrites: tuple[Rewrite, ...]) -> Callable[..., Any]:
    """The forward of a class, rewritten so that these patterns are fused.

    Raises:
        SourceError: where the forward cannot be rewritten.
    """
    definition, function, around = definition_of(layer)
    own = self_name(function)
    adds, pairs = find_adds(definition, own), find_pairs(definition, own)
    for rewrite in rewrites:
        if isinstance(rewrite, AddRewrite):
            fuse_add(adds[rewrite.index], rewrite, own)
        else:
            fuse_pair(pairs[rewrite.index], rewrite, own)
    return compiled(definition, function, around, layer)
