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
from collections.abc import Sequence
from dataclasses import dataclass

from .query_key_norms import PlacedPair

ROTATION_NAME = re.compile(r"(?<![a-z])(rot|rope)", re.IGNORECASE)
"""Part of the names of rotary embeddings: ``apply_rotary_pos_emb``, ``rotate_half_of_queries``, ``apply_rope``."""

_ARGUMENTS = (3, 4, 5)
"""The numbers of positional arguments of calls that can be fused: x, cos, sin; q, k, cos, sin; and one more."""


@dataclass(frozen=True)
class RotationCall:
    """One call of a rotary embedding.

    Attributes:
        rotate: the global name of the function.
        arguments: how many it is called with by position; 0 where it takes others than can be fused.
        pair: the number of the pair of q and k norms whose results it takes next, None without one.
    """

    rotate: str
    arguments: int
    pair: int | None


@dataclass(frozen=True)
class RotationRewrite:
    """The rotation number ``index``, to be fused by itself."""

    index: int


@dataclass
class PlacedRotation:
    """A ``RotationCall`` and the call."""

    rotation: RotationCall
    call: ast.Call


def find_rotations(definition: ast.FunctionDef, pairs: Sequence[PlacedPair]) -> list[PlacedRotation]:
    """The calls of rotary embeddings, and whatever takes the results of ``pairs`` as a rotation does."""
    after = {id(pair.rotation.value): index for index, pair in enumerate(pairs) if pair.rotation is not None}
    found = []
    for node in ast.walk(definition):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        pair = after.get(id(node))
        if pair is not None or (ROTATION_NAME.search(node.func.id) and len(node.args) >= min(_ARGUMENTS)):
            found.append(PlacedRotation(RotationCall(node.func.id, _arguments(node), pair), node))
    return found


def fuse_rotation(place: PlacedRotation, self_name: str) -> None:
    """Put the fused call in the rotation's place."""
    method = "fused_norm_rope_one" if place.rotation.arguments == 3 else "fused_norm_rope"
    place.call.args.insert(0, place.call.func)
    place.call.func = ast.Attribute(ast.Name(self_name, ast.Load()), method, ast.Load())


def _arguments(call: ast.Call) -> int:
    plain = not any(isinstance(argument, ast.Starred) for argument in call.args)
    plain = plain and all(keyword.arg == "unsqueeze_dim" for keyword in call.keywords)
    return len(call.args) if plain and len(call.args) in _ARGUMENTS else 0
