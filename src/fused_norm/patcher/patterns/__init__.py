"""The patterns in a module's forward that can be fused: found in its source, and the forward with them rewritten."""

from __future__ import annotations

import ast
import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..activation_recognition import Activation
from ..block import Block
from ..convolution_recognition import ConvolutionFunction
from ..dataflow import flow_of
from ..patch_report import Site
from ..probe import UnrecognisedError
from ..rewrite import Rewrite
from ..rotation_recognition import Rotation
from ..source import Helper, SourceError, cached_by_forward, compiled, helpers_of, source_of
from .adds import Add, decide_missed_add, find_adds, find_missed_adds
from .attentions import find_attentions
from .calls import Called, EditedForward, Missed
from .convolutions import (
    Convolution,
    convolutions_of,
    decide_convolutions,
    decide_missed_convolutions,
    find_convolutions,
)
from .gates import Gate, decide_gates, decide_missed_gates, find_gates, find_missed_gates
from .heads import Heads, find_heads
from .readers import Inputs, Reading, find_inputs, find_readings
from .rotations import RotationCall, decide_missed_rotations, decide_rotations, find_rotations, rotation_of


@dataclass
class Patterns:
    """The patterns found in a forward, with the nodes of its tree that they are made of.

    Attributes:
        adds: residual adds with a norm before or after them.
        readings: norms without an add in front of them, whose result one module reads.
        inputs: the arguments of the forward itself.
        heads: pairs of norms of queries and keys.
        rotations: calls of rotary embeddings.
        gates: products of something with what may be an activation.
        convolutions: calls of causal convolutions.
        missed_adds, missed_gates: those that are written in another way than is rewritten.
    """

    adds: list[Add]
    readings: list[Reading]
    inputs: list[Inputs]
    heads: list[Heads]
    rotations: list[RotationCall]
    gates: list[Gate]
    convolutions: list[Convolution]
    missed_adds: list[Missed]
    missed_gates: list[Missed]

    def decide(self, block: Block) -> Iterator[Site]:
        """The rows of all of them in a module with this forward; those to be fused are added to its rewrites."""
        for index, add in enumerate(self.adds):
            yield from add.decide(block, index)
        for missed in self.missed_adds:
            yield from decide_missed_add(missed, block)
        with_norms = [heads.decide(block, index, self._taken(block)) for index, heads in enumerate(self.heads)]
        for index, reading in enumerate(self.readings):
            reading.decide(block, index, self._taken(block))
        yield from decide_rotations(self.rotations, with_norms, block)
        yield from decide_gates(self.gates, self.missed_gates, block)
        yield from decide_convolutions(self.convolutions, block)

    def _taken(self, block: Block) -> set[ast.Call]:
        """The calls of norms that are part of a rewrite by now: none is part of two."""
        adds = (self.adds[one.index].calls(one.parts) for one in block.rewrites if one.pattern == "adds")
        heads = (self.heads[one.index].calls for one in block.rewrites if one.pattern == "heads")
        return {call for calls in (*adds, *heads) for call in calls}


@cached_by_forward
def patterns_of(layer: Any) -> Patterns:
    """The patterns in the forward that a class has now.

    Raises:
        SourceError: where the source cannot be read, or is not what runs.
    """
    source, flow = source_of(layer), flow_of(layer)
    attentions = find_attentions(flow)
    adds, heads, gates = find_adds(flow), find_heads(flow, attentions), find_gates(flow)
    rotated = {one.rotation[1]: index for index, one in enumerate(heads) if one.rotation is not None}
    rotations = find_rotations(source.definition, flow, rotated, attentions)
    readings = find_readings(flow, [add.after.call for add in adds if add.after is not None])
    missed = find_missed_adds(flow, adds), find_missed_gates(source.definition, flow, gates)
    convolutions = find_convolutions(source.definition, flow)
    return Patterns(adds, readings, find_inputs(layer), heads, rotations, gates, convolutions, *missed)


_IN_A_HELPER = "which its forward calls, and which is not rewritten"


@cached_by_forward
def _missed_in(helper: Helper) -> tuple[list[RotationCall], list[Convolution], list[Missed]]:
    """The rotations and convolutions in a method, and products with what may be an activation in it or a function."""
    definition, flow = source_of(helper).definition, flow_of(helper)
    gates = find_missed_gates(definition, flow, [])
    if helper.is_method:
        return find_rotations(definition, flow, {}, {}), find_convolutions(definition, flow), gates
    return [], [], [replace(one, conditions=()) for one in gates]  # which are not of a module's settings


def decide_helpers(block: Block) -> Iterator[Site]:
    """The rows of what is written in methods and functions that a module's forward calls, which are not rewritten."""
    for name, helper in helpers_of(block.origin).items():
        with contextlib.suppress(SourceError):
            rotations, convolutions, gates = _missed_in(helper)
            reason = f"is in {name}, {_IN_A_HELPER}"
            yield from decide_missed_rotations(rotations, block, helper, reason)
            yield from decide_missed_gates(gates, block, helper, reason)
            yield from decide_missed_convolutions(convolutions, block, helper, reason)


def rewritten_forward(layer: type[nn.Module], rewrites: tuple[Rewrite, ...]) -> Callable[..., Any]:
    """The forward of a class, rewritten so that these patterns are fused.

    Raises:
        SourceError: where the forward cannot be rewritten.
    """
    source = source_of(layer)
    # Copied together, so that the copied matches are made of the copied definition's nodes.
    definition, patterns = copy.deepcopy((source.definition, patterns_of(layer)))
    forward = EditedForward(definition, source.own)
    for rewrite in rewrites:
        getattr(patterns, rewrite.pattern)[rewrite.index].edit(rewrite, forward)
    return compiled(definition, layer)


def functions_of(
    layer: Any, rewrites: tuple[Rewrite, ...]
) -> tuple[tuple[Rotation, ...], tuple[ConvolutionFunction, ...]]:
    """The rotations and convolutions that ``rewrites`` fuse; what is none any more is left out, and called as it is."""
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
    return tuple(found), convolutions_of(layer, patterns.convolutions, rewrites)


def linears_of(rewrites: tuple[Rewrite, ...]) -> tuple[str, ...]:
    """The attributes of the linears that get inputs of their own by ``rewrites``."""
    return next((one.parts for one in rewrites if one.pattern == "inputs"), ())


def bypassed_by(
    layer: Any, rewrites: tuple[Rewrite, ...]
) -> tuple[list[str], list[str], list[tuple[Called, Activation]]]:
    """What the forward of a class with these rewrites takes to be plain, by the names of a module's attributes.

    Those are norms that it computes without a call, blocks whose linears read a norm, and activations.
    """
    patterns = patterns_of(layer)
    norms: dict[str, None] = {}
    readers: dict[str, None] = {}
    activations: dict[tuple[Called, Activation], None] = {}
    for rewrite in rewrites:
        match = getattr(patterns, rewrite.pattern)[rewrite.index]
        if rewrite.activation is not None:
            activations[match.act, rewrite.activation] = None
        else:
            for part, name in match.bypassed(rewrite.parts):
                (readers if part == "readers" else norms)[name] = None
    return list(norms), list(readers), list(activations)


def rewrites_around(layer: Any, rewrites: tuple[Rewrite, ...], seen: Mapping[str, bool]) -> Iterator[Rewrite]:
    """What is left of rewrites if other code sees the calls of some modules.

    ``seen``: their names, and whether each is a norm that may be called with a residual.
    """
    patterns = patterns_of(layer)
    for rewrite in rewrites:
        match = getattr(patterns, rewrite.pattern)[rewrite.index]
        gone = {part: seen[name] for part, name in match.bypassed(rewrite.parts) if name in seen}
        if gone.get("norm"):
            yield replace(rewrite, parts=("norm", "called"))
        elif "" not in gone:
            gone |= {also: False for part, also in (("inner", "dropout"), ("norm", "readers")) if part in gone}
            parts = tuple(part for part in rewrite.parts if part not in gone)
            yield from [replace(rewrite, parts=parts)] if parts or not gone else []
        elif "rotation" in rewrite.parts:
            numbers = (index for index, one in enumerate(patterns.rotations) if one.heads == rewrite.index)
            yield from (Rewrite("rotations", index) for index in numbers)
