"""The patterns in a forward that can be fused, the rows that they give, and the forward after they are rewritten."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

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
    """The forward of a class with these patterns fused.

    Raises:
        SourceError: if the forward cannot be rewritten.
    """
    source = source_of(layer)
    # Copied together, so that the copied matches consist of nodes of the copied definition.
    definition, patterns = copy.deepcopy((source.definition, patterns_of(layer)))
    forward = EditedForward(definition, source.own)
    matches = [(getattr(patterns, rewrite.pattern)[rewrite.index], rewrite) for rewrite in rewrites]
    for match, rewrite in sorted(matches, key=lambda pair: not pair[0].edits_first):
        match.edit(rewrite, forward)
    return compiled(definition, layer)


def functions_of(layer: Any, rewrites: tuple[Rewrite, ...]) -> dict[str, tuple[Any, ...]]:
    """The functions that ``rewrites`` fuse, recognised, by the attribute of the fused class that lists them.

    A function that is no longer one is left out and called as it is.
    """
    patterns, functions = patterns_of(layer), dict[str, list[Any]]()
    for rewrite in rewrites:
        match: Match = getattr(patterns, rewrite.pattern)[rewrite.index]
        for name, function in match.functions(layer, rewrite.parts):
            functions.setdefault(name, []).append(function)
    return {name: tuple(f for f in dict.fromkeys(found) if f is not None) for name, found in functions.items()}


def fused_parts(layer: Any, rewrites: tuple[Rewrite, ...]) -> set[tuple[str, str]]:
    """What ``rewrites`` fuse: the kinds of sites, each with the attribute of its norm, which is empty without one.

    A norm that has no site in the forward, as one of heads alone, has an empty kind.
    """
    patterns, kinds = patterns_of(layer), {"norm": "residual", "inner": "sandwich"}
    fused: set[tuple[str, str]] = set()
    for rewrite in rewrites:
        match: Match = getattr(patterns, rewrite.pattern)[rewrite.index]
        if match.kind is not None:
            fused.add((match.kind, ""))
            continue
        for part, name in match.bypassed(rewrite.parts):
            fused.add((kinds.get(part, part), name))
            fused |= {("rope", name)} if "rotation" in rewrite.parts else set()
    return fused


def linears_of(rewrites: tuple[Rewrite, ...]) -> tuple[str, ...]:
    """The attributes of the linears that get an input of their own by ``rewrites``."""
    return next((rewrite.parts for rewrite in rewrites if rewrite.pattern == "inputs"), ())


def bypassed_by(
    layer: Any, rewrites: tuple[Rewrite, ...]
) -> tuple[list[str], list[str], list[tuple[Callee, Activation]]]:
    """What the forward of a class with these rewrites assumes to be plain, by the names of a module's attributes.

    These are norms that it computes without a call, blocks whose linears read a norm, and activations.
    """
    patterns = patterns_of(layer)
    norms: dict[str, None] = {}
    consumers: dict[str, None] = {}
    activations: dict[tuple[Callee, Activation], None] = {}
    for rewrite in rewrites:
        match = getattr(patterns, rewrite.pattern)[rewrite.index]
        if rewrite.activation is not None:
            activations[match.act, rewrite.activation] = None
        else:
            for part, name in match.bypassed(rewrite.parts):
                (consumers if part == "consumers" else norms)[name] = None
    return list(norms), list(consumers), list(activations)


def rewrites_around(layer: Any, rewrites: tuple[Rewrite, ...], seen: Mapping[str, bool]) -> Iterator[Rewrite]:
    """The rewrites that remain if other code sees the calls of some modules.

    ``seen``: their names, and whether each is a norm that may be called with a residual.
    """
    patterns = patterns_of(layer)
    for rewrite in rewrites:
        match = getattr(patterns, rewrite.pattern)[rewrite.index]
        removed = {part: seen[name] for part, name in match.bypassed(rewrite.parts) if name in seen}
        if removed.get("norm"):
            yield replace(rewrite, parts=("norm", "called"))
        elif "" not in removed:
            removed |= {also: False for part, also in (("inner", "dropout"), ("norm", "consumers")) if part in removed}
            parts = tuple(part for part in rewrite.parts if part not in removed)
            yield from [replace(rewrite, parts=parts)] if parts or not removed else []
        elif "rotation" in rewrite.parts:
            indices = (index for index, call in enumerate(patterns.rotations) if call.heads == rewrite.index)
            yield from (Rewrite("rotations", index) for index in indices)
