"""A module's forward rewritten from its own source: the patterns found in it, and the forward with them fused."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from torch import nn

from .activation_recognition import Activation
from .forward_source import SourceError, compiled, definition_of, global_of, returns_sum, self_name
from .gates import Gate, GateRewrite, PlacedGate, find_gates, fuse_gate
from .norm_recognition import UnrecognisedError
from .query_key_norms import Pair, PairRewrite, PlacedPair, find_pairs, fuse_pair
from .residual_adds import Add, AddRewrite, PlacedAdd, find_adds, fuse_add
from .rotation_recognition import Rotation, recognise_rotation
from .rotations import PlacedRotation, RotationCall, RotationRewrite, find_rotations, fuse_rotation
from .sum_flow import MissedAdd, find_missed_adds

Rewrite = AddRewrite | PairRewrite | RotationRewrite | GateRewrite


@dataclass(frozen=True)
class Patterns:
    """The patterns found in a forward.

    Attributes:
        adds: residual adds with a norm before or after them.
        missed: adds that reach a norm in another way than is fused.
        pairs: pairs of q and k norms.
        rotations: calls of rotary embeddings.
        gates: products of something with an activation.
    """

    adds: tuple[Add, ...]
    missed: tuple[MissedAdd, ...]
    pairs: tuple[Pair, ...]
    rotations: tuple[RotationCall, ...]
    gates: tuple[Gate, ...]


def patterns_of(layer: Any) -> Patterns:
    """The patterns in the forward that a class has now.

    Raises:
        SourceError: where the source cannot be read, or is not what runs.
    """
    patterns = _patterns_of(layer, layer.forward)
    if isinstance(patterns, SourceError):
        raise type(patterns)(str(patterns))
    return patterns


@cache
def _patterns_of(layer: Any, forward: Callable[..., Any]) -> Patterns | SourceError:
    try:
        definition, function, _ = definition_of(layer)
    except SourceError as error:
        return error.with_traceback(None)
    own = self_name(function)
    places = _places_in(definition, own)
    return Patterns(
        adds=tuple(place.add for place in places.adds),
        missed=tuple(
            find_missed_adds(definition, places.adds, own, lambda name: returns_sum(function.__globals__.get(name)))
        ),
        pairs=tuple(place.pair for place in places.pairs),
        rotations=tuple(place.rotation for place in places.rotations),
        gates=tuple(place.gate for place in places.gates),
    )


class _Places(NamedTuple):
    """The patterns of a definition, and the statements that they are made of."""

    adds: list[PlacedAdd]
    pairs: list[PlacedPair]
    rotations: list[PlacedRotation]
    gates: list[PlacedGate]


def _places_in(definition: ast.FunctionDef, self_name: str) -> _Places:
    pairs = find_pairs(definition, self_name)
    return _Places(
        find_adds(definition, self_name),
        pairs,
        find_rotations(definition, pairs),
        find_gates(definition, self_name),
    )


def rotation_of(layer: Any, name: str, arguments: int = 4) -> Rotation:
    """The rotation that a forward calls by this global name, with so many arguments.

    Raises:
        SourceError: where the source cannot be read, or is not what runs.
        UnrecognisedError: where the name stands for something else.
    """
    return recognise_rotation(global_of(layer, name), arguments)


def rotations_of(layer: Any, rewrites: tuple[Rewrite, ...]) -> tuple[Rotation, ...]:
    """The rotations that ``rewrites`` fuse; one that is no longer a rotation is left out, and called as it is."""
    patterns = patterns_of(layer)
    calls = []
    for rewrite in rewrites:
        if isinstance(rewrite, RotationRewrite):
            call = patterns.rotations[rewrite.index]
            calls.append((call.rotate, call.arguments))
        elif isinstance(rewrite, PairRewrite) and rewrite.rotate:
            calls.append((patterns.pairs[rewrite.index].rotate or "", 4))
    found = []
    for name, arguments in dict.fromkeys(calls):
        with contextlib.suppress(UnrecognisedError):
            found.append(rotation_of(layer, name, arguments))
    return tuple(found)


def activations_of(rewrites: tuple[Rewrite, ...]) -> tuple[Activation, ...]:
    """The activations that ``rewrites`` fuse."""
    return tuple(dict.fromkeys(rewrite.activation for rewrite in rewrites if isinstance(rewrite, GateRewrite)))


def rewritten_forward(layer: type[nn.Module], rewrites: tuple[Rewrite, ...]) -> Callable[..., Any]:
    """The forward of a class, rewritten so that these patterns are fused.

    Raises:
        SourceError: where the forward cannot be rewritten.
    """
    definition, function, around = definition_of(layer)
    own = self_name(function)
    places = _places_in(definition, own)
    for rewrite in rewrites:
        match rewrite:
            case AddRewrite():
                fuse_add(places.adds[rewrite.index], rewrite, own)
            case PairRewrite():
                fuse_pair(places.pairs[rewrite.index], rewrite, own)
            case RotationRewrite():
                fuse_rotation(places.rotations[rewrite.index], own)
            case GateRewrite():
                fuse_gate(places.gates[rewrite.index], rewrite, own)
    return compiled(definition, function, around, layer)
