"""The calls of rotary embeddings in a forward: found in its source, and replaced by calls that may be fused.

In the forward of an attention,

    query, key = rotate(query, key, cos, sin)
    query, key = rotate(query, key, cos, sin, positions)
    query = rotate(query, cos, sin, unsqueeze_dim=2)

become, whatever the names are and wherever the calls stand,

    query, key = self.fused_norm_rope(rotate, query, key, cos, sin)
    query, key = self.fused_norm_rope(rotate, query, key, cos, sin, positions)
    query = self.fused_norm_rope_one(rotate, query, cos, sin, unsqueeze_dim=2)

The arguments are evaluated at the same place, and ``rotate`` is looked up at every call.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn

from ..block import Block
from ..dataflow import Conditions, flow_of, may_hold
from ..fused_block import Rewrite
from ..hooks import stock_class
from ..patch_report import Site
from ..probe import UnrecognisedError
from ..rotation_recognition import Rotation, recognise_rotation
from ..source import global_of, names_in
from .attentions import Attention, find_attentions
from .calls import EditedForward, Match, Patterns

ROTATION_NAME = re.compile(r"(?<![a-z])(rot|rope)", re.IGNORECASE)
"""Part of the names of rotary embeddings: ``apply_rotary_pos_emb``, ``rotate_half_of_queries``, ``apply_rope``."""

_ARGUMENTS = (3, 4, 5)
"""How many positional arguments calls have that can be fused: x, cos, sin; q, k, cos, sin; and one more."""


@dataclass(repr=False)
class RotationCall(Match):
    """A call of a rotary embedding.

    Attributes:
        call: the call.
        heads: the index of the q and k norms whose results it takes next, or None.
        attention: the attention that alone reads its results, or None.
        conditions: those on settings of the module under which it is called.
    """

    pattern, kind, is_named = "rotations", "rope", True

    call: ast.Call
    heads: int | None
    attention: Attention | None
    conditions: Conditions

    @classmethod
    def find(cls, layer: Any, found: Patterns) -> list[RotationCall]:
        """The calls of rotary embeddings, by name, and any calls that follow norms of queries and keys."""
        flow, attentions, rotations = flow_of(layer), find_attentions(layer), []
        after = {pair.rotation[1]: index for index, pair in enumerate(found.heads) if pair.rotation is not None}
        for call in ast.walk(flow.definition):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                named = {word.arg for word in call.keywords}
                takes_angles = len(call.args) >= min(_ARGUMENTS) or {"cos", "sin"} <= named
                if call in after or (takes_angles and ROTATION_NAME.search(call.func.id)):
                    rotations.append(cls(call, after.get(call), attentions.get(call), flow.conditions(call)))
        return rotations

    @classmethod
    def may_be_in(cls, module: nn.Module) -> bool:
        """Return whether a module's forward uses the name of a rotary embedding of its file."""
        origin = stock_class(module)
        return any(ROTATION_NAME.search(name) and global_of(origin, name) is not None for name in names_in(origin))

    @property
    def rotate(self) -> str:
        """The global name of the function."""
        assert isinstance(self.call.func, ast.Name)
        return self.call.func.id

    @property
    def arguments(self) -> int:
        """The number of its positional arguments; 0 if it takes others than can be fused."""
        is_starred = any(isinstance(argument, ast.Starred) for argument in self.call.args)
        is_plain = not is_starred and all(keyword.arg == "unsqueeze_dim" for keyword in self.call.keywords)
        return len(self.call.args) if is_plain and len(self.call.args) in _ARGUMENTS else 0

    def functions(self, layer: Any, parts: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """See ``Match``."""
        yield "fused_norm_rotations", rotation_or_none(global_of(layer, self.rotate), self.arguments)

    def decide(self, block: Block, index: int, found: Patterns) -> Iterator[Site]:
        """The row of the rotation, unless the module's settings never call it; it may be fused with norms before it."""
        of_heads = [rewrite for rewrite in block.rewrites if (rewrite.pattern, rewrite.index) == ("heads", self.heads)]
        if any("rotation" in rewrite.parts for rewrite in of_heads):
            row = found.heads[self.heads].rotation_row(block, self.heads)
        else:
            row = block.own_row("rope", block.applied_parts("rotations", index) is not None)
            row = unless_unrecognised(row, self.rotate, self.arguments, block)
            parts = () if self.attention is None else self.attention.parts(block)
            block.rewrites += [Rewrite("rotations", index, parts, what="rope")] if row.reason is None else []
        if may_hold(self.conditions, block.module):
            yield row

    def edit(self, rewrite: Rewrite, forward: EditedForward) -> None:
        """Replace the call by the fused call."""
        method = "fused_norm_rope_one" if self.arguments == 3 else "fused_norm_rope"
        if self.attention is not None:
            self.attention.edit_before(self.call, rewrite, forward)
        self.call.args.insert(0, self.call.func)
        self.call.func = forward.code(f"self.{method}")


def rotation_or_none(function: Any, arguments: int) -> Rotation | None:
    """The rotation that a function computes now, or None."""
    try:
        return recognise_rotation(function, arguments)
    except UnrecognisedError:
        return None


def unless_unrecognised(row: Site, rotate: str, arguments: int, block: Block) -> Site:
    """``row``, or one with the reason why a call of ``rotate`` with so many arguments is not fused."""
    if row.reason is not None:
        return row
    if not arguments:
        return row.skipped(f"{rotate} takes other arguments than q, k, cos, sin")
    function = global_of(block.origin, rotate)
    try:
        recognise_rotation(function, arguments)
    except UnrecognisedError as error:
        if isinstance(function, nn.Module):  # with another forward bound to it, as `kernelize` does
            function = getattr(vars(function).get("forward"), "__func__", None)
        package = block.origin.__module__.partition(".")[0]
        if isinstance(function, FunctionType) and function.__module__.partition(".")[0] != package:
            owner = f"{function.__module__}.{function.__qualname__}"
            row = row.skipped(f"{rotate} was replaced, by {owner}", "overridden")
        return row.skipped(str(error))
    return row
