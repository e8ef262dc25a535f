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

from .calls import Rewrite
from .heads import Heads

ROTATION_NAME = re.compile(r"(?<![a-z])(rot|rope)", re.IGNORECASE)
"""Part of the names of rotary embeddings: ``apply_rotary_pos_emb``, ``rotate_half_of_queries``, ``apply_rope``."""

_ARGUMENTS = (3, 4, 5)
"""The numbers of positional arguments of calls that can be fused: x, cos, sin; q, k, cos, sin; and one more."""


@dataclass
class RotationCall:
    """One call of a rotary embedding.

    Attributes:
        call: the call.
        heads: the number of the q and k norms whose results it takes next, None without any.
    """

    call: ast.Call
    heads: int | None

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

    def edit(self, rewrite: Rewrite, own: str) -> None:
        """Put the fused call in the rotation's place."""
        method = "fused_norm_rope_one" if self.arguments == 3 else "fused_norm_rope"
        self.call.args.insert(0, self.call.func)
        self.call.func = ast.Attribute(ast.Name(own, ast.Load()), method, ast.Load())


def find_rotations(definition: ast.FunctionDef, heads: Sequence[Heads]) -> list[RotationCall]:
    """The calls of rotary embeddings, and whatever takes the results of ``heads`` as a rotation does."""
    after = {one.rotation[1]: index for index, one in enumerate(heads) if one.rotation is not None}
    return [
        RotationCall(call, after.get(call))
        for call in ast.walk(definition)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        if call in after or (ROTATION_NAME.search(call.func.id) and len(call.args) >= min(_ARGUMENTS))
    ]
