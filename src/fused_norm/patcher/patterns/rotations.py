"""The calls of rotary embeddings in a forward: found in its source, and replaced by calls that may be fused.

In the forward of an attention,

    query, key = rotate(query, key, cos, sin)
    query, key = rotate(query, key, cos, sin, positions)
    query = rotate(query, cos, sin, unsqueeze_dim=2)

become, whatever the names are and wherever the calls stand,

    query, key = self.fused_norm_rope(rotate, query, key, cos, sin)
    query, key = self.fused_norm_rope(rotate, query, key, cos, sin, positions)
    query = self.fused_norm_rope_one(rotate, query, cos, sin, unsqueeze_dim=2)

Every argument is computed where it was, and what ``rotate`` stands for is looked up at each call.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn

from ..block import Block
from ..dataflow import Conditions, Dataflow, come_out_so
from ..patch_report import Site
from ..probe import UnrecognisedError
from ..rewrite import Rewrite
from ..rotation_recognition import Rotation, recognise_rotation
from ..source import global_of
from .attentions import Attention
from .calls import EditedForward, Match

ROTATION_NAME = re.compile(r"(?<![a-z])(rot|rope)", re.IGNORECASE)
"""Part of the names of rotary embeddings: ``apply_rotary_pos_emb``, ``rotate_half_of_queries``, ``apply_rope``."""

_ARGUMENTS = (3, 4, 5)
"""The numbers of positional arguments of calls that can be fused: x, cos, sin; q, k, cos, sin; and one more."""


@dataclass
class RotationCall(Match):
    """One call of a rotary embedding.

    Attributes:
        call: the call.
        heads: the number of the q and k norms whose results it takes next, None without any.
        attention: what alone reads its results; None where it is something else.
        conditions: those under which it is made, as far as settings of the module decide it.
    """

    call: ast.Call
    heads: int | None
    attention: Attention | None
    conditions: Conditions

    @property
    def rotate(self) -> str:
        """The global name of the function."""
        assert isinstance(self.call.func, ast.Name)
        return self.call.func.id

    @property
    def arguments(self) -> int:
        """The number of its positional arguments; 0 where it takes others than can be fused."""
        plain = not any(isinstance(argument, ast.Starred) for argument in self.call.args)
        plain = plain and all(keyword.arg == "unsqueeze_dim" for keyword in self.call.keywords)
        return len(self.call.args) if plain and len(self.call.args) in _ARGUMENTS else 0

    def edit(self, rewrite: Rewrite, forward: EditedForward) -> None:
        """Put the fused call in the rotation's place."""
        method = "fused_norm_rope_one" if self.arguments == 3 else "fused_norm_rope"
        if self.attention is not None:
            self.attention.edit(self.call, rewrite, forward)
        self.call.args.insert(0, self.call.func)
        self.call.func = ast.Attribute(ast.Name(forward.own, ast.Load()), method, ast.Load())


def decide_rotations(
    rotations: Sequence[RotationCall], with_norms: Sequence[Site | None], block: Block
) -> Iterator[Site]:
    """The rows of rotations, but for those that the module's settings never run.

    ``with_norms``: the rows of norms of queries and keys that are fused with a rotation after them.
    """
    for index, rotation in enumerate(rotations):
        row = None if rotation.heads is None else with_norms[rotation.heads]
        if row is None:
            row = block.own_row("rope", block.applied_parts("rotations", index) is not None)
            row = unless_unrecognised(row, rotation.rotate, rotation.arguments, block)
            parts = () if rotation.attention is None else rotation.attention.parts(block)
            block.rewrites += [Rewrite("rotations", index, parts)] if row.reason is None else []
        if come_out_so(rotation.conditions, block.module):
            yield row


def decide_missed_rotations(
    rotations: Sequence[RotationCall], block: Block, function: Any, reason: str
) -> Iterator[Site]:
    """The rows of rotations that cannot be fused, for a ``reason``.

    ``function``: what they are called in, a class for its forward.
    """
    for rotation in rotations:
        with suppress(UnrecognisedError):
            if rotation.arguments and come_out_so(rotation.conditions, block.module):
                rotation_of(function, rotation.rotate, rotation.arguments)
                row = block.own_row("rope", already=False)
                yield row.skipped(f"its {rotation.rotate} {reason}", in_helper=function is not block.origin)


def unless_unrecognised(row: Site, rotate: str, arguments: int, block: Block) -> Site:
    """``row``, or one that says why the function called by this name, with so many arguments, is not fused."""
    if row.reason is not None:
        return row
    if not arguments:
        return row.skipped(f"{rotate} takes other arguments than q, k, cos, sin")
    try:
        rotation_of(block.origin, rotate, arguments)
    except UnrecognisedError as error:
        owner = _owner_of(global_of(block.origin, rotate), block.origin)
        row = row if owner is None else row.skipped(f"{rotate} was replaced, by {owner}", "overridden")
        return row.skipped(str(error))
    return row


def rotation_of(layer: Any, name: str, arguments: int = 4) -> Rotation:
    """The rotation that a forward calls by this global name, with so many arguments.

    Raises:
        SourceError: where the forward is no function.
        UnrecognisedError: where the name stands for something else.
    """
    return recognise_rotation(global_of(layer, name), arguments)


def _owner_of(function: Any, origin: type[nn.Module]) -> str | None:
    """The name of a function of another package than that of the class which calls it; None for one of its own."""
    if isinstance(function, nn.Module):  # with another forward bound to it, as `kernelize` does
        function = getattr(vars(function).get("forward"), "__func__", None)
    if not isinstance(function, FunctionType):
        return None
    if function.__module__.partition(".")[0] == origin.__module__.partition(".")[0]:
        return None
    return f"{function.__module__}.{function.__qualname__}"


def find_rotations(
    definition: ast.FunctionDef, flow: Dataflow, after: Mapping[ast.Call, int], attentions: Mapping[ast.Call, Attention]
) -> list[RotationCall]:
    """The calls of rotary embeddings, and those ``after`` norms of queries and keys, whose number is given."""
    return [
        RotationCall(call, after.get(call), attentions.get(call), flow.conditions(call))
        for call in ast.walk(definition)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        if call in after or (ROTATION_NAME.search(call.func.id) and len(call.args) >= min(_ARGUMENTS))
    ]
