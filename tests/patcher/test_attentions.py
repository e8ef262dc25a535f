"""An attention function that alone reads rotated queries and keys is asked for the dtype that it reads."""

from __future__ import annotations

import pytest

from .forwards import Cache, Heads, assert_becomes, layer_of

BEFORE = "v = v.view(1)"
ROTATION = "q, k = rotate(q, k, angles[0], angles[1])"
UPDATE = "if cache is not None:\n    k, v = cache.update(k, v)"
LOOKUP = "function = attend\nif self.flag:\n    function = ATTENTIONS[self.factor]"
CALL = "output, weights = function(self, q, k, v, mask, scaling=self.factor, **further)"
AFTER = "return output"
FORWARD = (BEFORE, ROTATION, UPDATE, LOOKUP, CALL, AFTER)
FUSED_ROTATION = "q, k = self.fused_norm_rope(rotate, q, k, angles[0], angles[1])"
READ_DTYPE = ", dtype=self.fused_norm_read_dtype(function, cache, mask, k, v, further))"
ASKED = FUSED_ROTATION.removesuffix(")") + READ_DTYPE
FUSED = (BEFORE, LOOKUP, ASKED, UPDATE, CALL, AFTER)
NORMS = "q = self.q_norm(q)\nk = self.k_norm(k)"
ROTATED = ASKED.replace("fused_norm_rope(", "fused_norm_rotated(self.q_norm, self.k_norm, ")


def swapped(old: str, new: str, forward: tuple[str, ...] = FORWARD) -> tuple[str, ...]:
    parts = tuple(part.replace(old, new) for part in forward)
    assert parts != forward
    return parts


CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...] | None]] = {
    "asked": (FORWARD, FUSED),
    "without a cache": (
        (BEFORE, ROTATION, LOOKUP, CALL, AFTER),
        (BEFORE, LOOKUP, ASKED.replace("cache", "None"), CALL, AFTER),
    ),
    "without further arguments": (
        swapped(", **further", ""), swapped(", **further", "", swapped(", further", ", ()", FUSED))
    ),
    "after norms": ((BEFORE, NORMS, *FORWARD[1:]), (BEFORE, "q = q\nk = k", LOOKUP, ROTATED, UPDATE, CALL, AFTER)),
    "q is read later": (swapped(AFTER, "return output, q"), None),
    "q is read by a function": ((BEFORE, "later = lambda: q", *FORWARD[1:]), None),
    "k is read in between": ((*FORWARD[:2], "k = k.view(1)", *FORWARD[2:]), None),
    "k is the query": (swapped("(self, q, k,", "(self, k, q,"), None),
    "q tells the scale": (swapped("scaling=self.factor", "scaling=q.value"), None),
    "another condition": (swapped("cache is not None", "cache"), None),
    "a mask that the rotation's line makes": (swapped("angles[1])", "angles[1], (mask := mask + 1))"), None),
    "values that come later": ((ROTATION, BEFORE, *FORWARD[2:]), None),
    "a local function": ((BEFORE, ROTATION, UPDATE, "function = other or attend", CALL, AFTER), None),
    "another name beside the lookup": (swapped(LOOKUP, f"angles = self.factor, 8\n{LOOKUP}"), None),
    "work beside the lookup": (swapped(LOOKUP, f"{LOOKUP}\nself.factor = 8"), None),
}  # fmt: skip
"""The statements of an attention's forward, before and after; None: the rotation is fused, and nothing else changes."""


@pytest.mark.parametrize("name", CASES)
def test_the_function_is_asked_before_the_rotation_if_nothing_else_could_tell(name: str) -> None:
    before, after = CASES[name]
    if after is None:
        after = tuple(part.replace("= rotate(", "= self.fused_norm_rope(rotate, ") for part in before)
    arguments = Heads(2), Heads(3), Heads(4), (5, 7), 6
    with_cache = [(*arguments, Cache())] if UPDATE in before else []
    parameters = "q, k, v, angles, mask, cache=None, other=None, **further"
    assert_becomes(layer_of("\n".join(before), parameters), "\n".join(after), arguments, *with_cache)
