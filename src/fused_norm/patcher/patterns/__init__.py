"""The patterns in a module's forward that can be fused: found in its source, and the forward with them rewritten."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..activation_recognition import Activation
from ..dataflow import Dataflow
from ..probe import UnrecognisedError
from ..rotation_recognition import Rotation, recognise_rotation
from ..source import cached_by_forward, compiled, global_of, source_of
from .adds import Add, MissedAdd, find_adds, find_missed_adds
from .calls import Rewrite
from .gates import Gate, MissedGate, find_gates, find_missed_gates
from .heads import Heads, find_heads
from .rotations import RotationCall, find_rotations


@dataclass
class Patterns:
    """The patterns found in a forward, with the nodes of its tree that they are made of.

    Attributes:
        adds: residual adds with a norm before or after them.
        heads: pairs of norms of queries and keys.
        rotations: calls of rotary embeddings.
        gates: products of something with what may be an activation.
        missed_adds, missed_gates: those that are written in another way than is rewritten.
    """

    adds: list[Add]
    heads: list[Heads]
    rotations: list[RotationCall]
    gates: list[Gate]
    missed_adds: list[MissedAdd]
    missed_gates: list[MissedGate]


@cached_by_forward
def patterns_of(layer: Any) -> Patterns:
    """The patterns in the forward that a class has now.

    Raises:
        SourceError: where the source cannot be read, or is not what runs.
    """
    source = source_of(layer)
    flow = Dataflow(source.definition, source.own)
    adds, heads, gates = find_adds(flow), find_heads(flow), find_gates(flow)
    return Patterns(
        adds,
        heads,
        find_rotations(source.definition, heads),
        gates,
        find_missed_adds(flow, adds),
        find_missed_gates(source.definition, flow, gates),
    )


def rewritten_forward(layer: type[nn.Module], rewrites: tuple[Rewrite, ...]) -> Callable[..., Any]:
    """The forward of a class, rewritten so that these patterns are fused.

    Raises:
        SourceError: where the forward cannot be rewritten.
    """
    source = source_of(layer)
    # Copied together, so that the copied matches are made of the copied definition's nodes.
    definition, patterns = copy.deepcopy((source.definition, patterns_of(layer)))
    for rewrite in rewrites:
        getattr(patterns, rewrite.pattern)[rewrite.index].edit(rewrite, source.own)
    return compiled(definition, layer)


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
        if rewrite.pattern == "rotations":
            call = patterns.rotations[rewrite.index]
            calls.append((call.rotate, call.arguments))
        elif "rotation" in rewrite.parts:
            calls.append((patterns.heads[rewrite.index].rotate or "", 4))
    found = []
    for name, arguments in dict.fromkeys(calls):
        with contextlib.suppress(UnrecognisedError):
            found.append(rotation_of(layer, name, arguments))
    return tuple(found)


def activations_of(rewrites: tuple[Rewrite, ...]) -> tuple[Activation, ...]:
    """The activations that ``rewrites`` fuse."""
    return tuple(dict.fromkeys(rewrite.activation for rewrite in rewrites if rewrite.activation is not None))
