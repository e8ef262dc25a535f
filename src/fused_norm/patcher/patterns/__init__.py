"""The patterns in a forward that can be fused, the rows that they give, and the forward after they are rewritten."""

from __future__ import annotations

import ast
import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..activation_recognition import Activation
from ..block import Block
from ..convolution_recognition import ConvolutionFunction, recognise_convolution
from ..dataflow import flow_of
from ..fused_block import Rewrite
from ..patch_report import Site
from ..probe import UnrecognisedError
from ..rotation_recognition import Rotation, recognise_rotation
from ..source import Helper, SourceError, cached_by_forward, compiled, global_of, helpers_of, source_of
from .adds import Add, decide_missed_add, find_adds, find_missed_adds
from .attentions import find_attentions
from .calls import Callee, EditedForward, Missed
from .consumers import ConsumedNorm, Inputs, find_consumed_norms, find_inputs
from .convolutions import Convolution, decide_convolutions, decide_missed_convolutions, find_convolutions
from .gates import Gate, decide_gates, decide_missed_gates, find_gates, find_missed_gates
from .heads import Heads, find_heads
from .rotations import RotationCall, decide_missed_rotations, decide_rotations, find_rotations


@dataclass
class Patterns:
    """The patterns in a forward, made of the nodes of its tree.

    Attributes:
        adds: residual adds with a norm before or after them.
        consumed_norms: norms without an add before them, whose result one module reads.
        inputs: the arguments of the forward itself.
        heads: pairs of norms of queries and keys.
        rotations: calls of rotary embeddings.
        gates: products of something with what may be an activation.
        convolutions: calls of causal convolutions.
        missed_adds, missed_gates: those that are written in a way that is not rewritten.
    """

    adds: list[Add]
    consumed_norms: list[ConsumedNorm]
    inputs: list[Inputs]
    heads: list[Heads]
    rotations: list[RotationCall]
    gates: list[Gate]
    convolutions: list[Convolution]
    missed_adds: list[Missed]
    missed_gates: list[Missed]

    def decide(self, block: Block) -> Iterator[Site]:
        """The rows of all of them in a module with this forward; it adds those to be fused to the block's rewrites."""
        for index, add in enumerate(self.adds):
            yield from add.decide(block, index)
        for missed in self.missed_adds:
            yield from decide_missed_add(missed, block)
        with_norms = [heads.decide(block, index, self._taken(block)) for index, heads in enumerate(self.heads)]
        for index, norm in enumerate(self.consumed_norms):
            norm.decide(block, index, self._taken(block))
        yield from decide_rotations(self.rotations, with_norms, block)
        yield from decide_gates(self.gates, self.missed_gates, block)
        yield from decide_convolutions(self.convolutions, block)

    def _taken(self, block: Block) -> set[ast.Call]:
        """The calls of norms that are already part of a rewrite: none is part of two."""
        taken: set[ast.Call] = set()
        for rewrite in block.rewrites:
            if rewrite.pattern == "adds":
                taken.update(self.adds[rewrite.index].calls(rewrite.parts))
            elif rewrite.pattern == "heads":
                taken.update(self.heads[rewrite.index].calls)
        return taken


@cached_by_forward
def patterns_of(layer: Any) -> Patterns:
    """The patterns in the forward that a class has now.

    Raises:
        SourceError: if the source cannot be read, or is not what runs.
    """
    flow = flow_of(layer)
    attentions = find_attentions(flow)
    adds, heads, gates = find_adds(flow), find_heads(flow, attentions), find_gates(flow)
    rotated = {pair.rotation[1]: index for index, pair in enumerate(heads) if pair.rotation is not None}
    rotations = find_rotations(flow, rotated, attentions)
    consumed_norms = find_consumed_norms(flow, [add.after.call for add in adds if add.after is not None])
    missed = find_missed_adds(flow, adds), find_missed_gates(flow, gates)
    convolutions = find_convolutions(flow)
    return Patterns(adds, consumed_norms, find_inputs(layer), heads, rotations, gates, convolutions, *missed)


@cached_by_forward
def _missed_in(helper: Helper) -> tuple[list[RotationCall], list[Convolution], list[Missed]]:
    """The rotations and convolutions in a method, and products with what may be an activation in it or a function."""
    flow = flow_of(helper)
    gates = find_missed_gates(flow, [])
    if helper.is_method:
        return find_rotations(flow, {}, {}), find_convolutions(flow), gates
    return [], [], [replace(gate, conditions=()) for gate in gates]  # a function has no settings of a module


def decide_helpers(block: Block) -> Iterator[Site]:
    """The rows of what methods and functions compute that a module's forward calls; they are not rewritten."""
    for name, helper in helpers_of(block.origin).items():
        with contextlib.suppress(SourceError):
            rotations, convolutions, gates = _missed_in(helper)
            reason = f"is in {name}, which its forward calls, and which is not rewritten"
            yield from decide_missed_rotations(rotations, block, helper, reason)
            yield from decide_missed_gates(gates, block, helper, reason)
            yield from decide_missed_convolutions(convolutions, block, helper, reason)


def rewritten_forward(layer: type[nn.Module], rewrites: tuple[Rewrite, ...]) -> Callable[..., Any]:
    """The forward of a class with these patterns fused; its own one if there are none.

    Raises:
        SourceError: if the forward cannot be rewritten.
    """
    if not rewrites:
        return layer.forward
    source = source_of(layer)
    # Copied together, so that the copied matches consist of nodes of the copied definition.
    definition, patterns = copy.deepcopy((source.definition, patterns_of(layer)))
    forward = EditedForward(definition, source.own)
    for rewrite in sorted(rewrites, key=lambda edit: edit.pattern != "inputs"):  # what other edits pass on
        getattr(patterns, rewrite.pattern)[rewrite.index].edit(rewrite, forward)
    return compiled(definition, layer)


def functions_of(
    layer: Any, rewrites: tuple[Rewrite, ...]
) -> tuple[tuple[Rotation, ...], tuple[ConvolutionFunction, ...]]:
    """The rotations and convolutions that ``rewrites`` fuse.

    A function that is no longer one is left out and called as it is.
    """
    patterns = patterns_of(layer)
    rotation_calls, rotations, convolutions = [], [], []
    for rewrite in rewrites:
        if rewrite.pattern == "rotations":
            call = patterns.rotations[rewrite.index]
            rotation_calls.append((call.rotate, call.arguments))
        elif "rotation" in rewrite.parts:
            rotation_calls.append((patterns.heads[rewrite.index].rotate or "", 4))
        elif rewrite.pattern == "convolutions" and patterns.convolutions[rewrite.index].callee.is_function:
            with contextlib.suppress(UnrecognisedError):
                name = patterns.convolutions[rewrite.index].callee.name
                convolutions.append(recognise_convolution(global_of(layer, name)))
    for name, arguments in dict.fromkeys(rotation_calls):
        with contextlib.suppress(UnrecognisedError):
            rotations.append(recognise_rotation(global_of(layer, name), arguments))
    return tuple(rotations), tuple(dict.fromkeys(convolutions))


def linears_of(rewrites: tuple[Rewrite, ...]) -> tuple[str, ...]:
    """The attributes of the linears that get an input of their own by ``rewrites``."""
    return next((rewrite.parts for rewrite in rewrites if rewrite.pattern == "inputs"), ())


def bypassed_by(layer: Any, rewrites: tuple[Rewrite, ...]) -> tuple[list[str], list[tuple[Callee, Activation]]]:
    """The norms and the activations that the forward of a class with these rewrites computes without a call."""
    patterns = patterns_of(layer)
    norms: dict[str, None] = {}
    activations: dict[tuple[Callee, Activation], None] = {}
    for rewrite in rewrites:
        match = getattr(patterns, rewrite.pattern)[rewrite.index]
        if rewrite.activation is not None:
            activations[match.act, rewrite.activation] = None
        else:
            norms |= dict.fromkeys(match.bypassed(rewrite.parts))
    return list(norms), list(activations)


def rewrites_with_calls(layer: Any, rewrites: tuple[Rewrite, ...]) -> Iterator[Rewrite]:
    """What remains of the rewrites of a forward that calls all norms and activations, and passes on what they return.

    A norm after an add may be called with the residual.
    """
    for rewrite in rewrites:
        patterns = patterns_of(layer)
        if not getattr(patterns, rewrite.pattern)[rewrite.index].bypassed(rewrite.parts):
            yield rewrite
        elif rewrite.pattern == "adds" and "norm" in rewrite.parts:
            yield replace(rewrite, parts=("norm", "called"))
        elif "rotation" in rewrite.parts:
            indices = (index for index, call in enumerate(patterns.rotations) if call.heads == rewrite.index)
            yield from (Rewrite("rotations", index) for index in indices)
