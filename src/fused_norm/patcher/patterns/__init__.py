"""The patterns in a forward that can be fused, the rows that they give, and the forward after they are rewritten."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from ...spec import Kind
from ..activation_recognition import Activation
from ..block import Block
from ..fused_block import Rewrite
from ..patch_report import Site
from ..source import cached_by_forward, compiled, source_of
from .adds import Add
from .calls import Callee, EditedForward, Match, Patterns
from .consumers import ConsumedNorm, Inputs
from .convolutions import Convolution
from .gates import Gate
from .heads import Heads
from .rotations import RotationCall

MATCHES: tuple[type[Match], ...] = (Add, Heads, ConsumedNorm, RotationCall, Gate, Convolution, Inputs)
"""The patterns, in the order in which they are found and decided on: those after others know what these have taken."""


@cached_by_forward
def patterns_of(layer: Any) -> Patterns:
    """The patterns in the forward that a class has now.

    Raises:
        SourceError: if the source cannot be read, or is not what runs.
    """
    found = Patterns()
    for match in MATCHES:
        setattr(found, match.pattern, match.find(layer, found))
    return found


def decide_matches(block: Block) -> Iterator[Site]:
    """The rows of all matches in the forward of a module; those to be fused join its rewrites.

    Raises:
        SourceError: as ``patterns_of``.
    """
    found = patterns_of(block.origin)
    for match in MATCHES:
        yield from match.decide_all(block, found)


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
    for match, rewrite in sorted(patterns.fused_by(rewrites), key=lambda pair: not pair[0].edits_first):
        match.edit(rewrite, forward)
    return compiled(definition, layer)


def functions_of(layer: Any, rewrites: tuple[Rewrite, ...]) -> dict[str, tuple[Any, ...]]:
    """The functions that ``rewrites`` fuse, recognised, by the attribute of the fused class that lists them.

    A function that is no longer one is left out and called as it is.
    """
    functions: dict[str, list[Any]] = {}
    for match, rewrite in patterns_of(layer).fused_by(rewrites):
        for name, function in match.functions(layer, rewrite.parts):
            functions.setdefault(name, []).append(function)
    return {name: tuple(f for f in dict.fromkeys(found) if f is not None) for name, found in functions.items()}


def fused_sites(layer: Any, rewrites: tuple[Rewrite, ...]) -> set[tuple[Kind | None, str]]:
    """The sites that ``rewrites`` fuse, see ``Match``."""
    matches = patterns_of(layer).fused_by(rewrites)
    return {site for match, rewrite in matches for site in match.fused_sites(rewrite.parts)}


def linears_of(rewrites: tuple[Rewrite, ...]) -> tuple[str, ...]:
    """The attributes of the linears that get an input of their own by ``rewrites``."""
    return next((rewrite.parts for rewrite in rewrites if rewrite.pattern == "inputs"), ())


def bypassed_by(layer: Any, rewrites: tuple[Rewrite, ...]) -> tuple[list[str], list[tuple[Callee, Activation]]]:
    """The norms and the activations that the forward of a class with these rewrites computes without a call."""
    norms: dict[str, None] = {}
    activations: dict[tuple[Callee, Activation], None] = {}
    match: Any
    for match, rewrite in patterns_of(layer).fused_by(rewrites):
        if rewrite.activation is not None:
            activations[match.act, rewrite.activation] = None
        else:
            norms |= dict.fromkeys(match.bypassed(rewrite.parts))
    return list(norms), list(activations)


def rewrites_with_calls(layer: Any, rewrites: tuple[Rewrite, ...]) -> Iterator[Rewrite]:
    """The rewrites of the forward that makes every call of a norm or an activation, and passes on what they return.

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
