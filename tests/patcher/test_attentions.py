"""An attention function that alone reads rotated queries and keys is asked for the dtype that it reads."""

from __future__ import annotations

import importlib

import pytest

from fused_norm.patcher.patterns import patterns_of

from .forwards import Cache, Heads, assert_becomes, layer_of

BEFORE = "v = v.view(1)"
ROTATION = "q, k = rotate(q, k, angles[0], angles[1])"
UPDATE = "if cache is not None:\n    k, v = cache.update(k, v)"
LOOKUP = "function = attend\nif self.flag:\n    function = ATTENTIONS[self.factor]"
CALL = "output, weights = function(self, q, k, v, mask, scaling=self.factor, **further)"
AFTER = "return output"
FORWARD = (BEFORE, ROTATION, UPDATE, LOOKUP, CALL, AFTER)
ASKED = """q, k = self.fused_norm_rope(rotate, q, k, angles[0], angles[1],
    dtype=self.fused_norm_read_dtype(function, cache, mask, k, v, further))"""
FUSED = (BEFORE, LOOKUP, ASKED, UPDATE, CALL, AFTER)


def attention_of(*parts: str) -> type:
    return layer_of("\n".join(parts), "q, k, v, angles, mask, cache=None, other=None, **further")


def swapped(old: str, new: str, forward: tuple[str, ...] = FORWARD) -> tuple[str, ...]:
    parts = tuple(part.replace(old, new) for part in forward)
    assert parts != forward
    return parts


GET = "function: object = ATTENTIONS.get(self.factor, attend)"
NORMS = "q = self.q_norm(q)\nk = self.k_norm(k)"
ROTATED = ASKED.replace("fused_norm_rope(", "fused_norm_rotated(self.q_norm, self.k_norm, ")

ALONE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "transformers 4": (FORWARD, FUSED),
    "transformers 5": (swapped(LOOKUP, GET), swapped(LOOKUP, GET, FUSED)),
    "without a cache": (
        (BEFORE, ROTATION, LOOKUP, CALL, AFTER),
        (BEFORE, LOOKUP, ASKED.replace("cache", "None"), CALL, AFTER),
    ),
    "looked up before": ((BEFORE, LOOKUP, ROTATION, UPDATE, CALL, AFTER), FUSED),
    "without further arguments": (
        swapped(", **further", ""),
        swapped(", **further", "", swapped(", further", ", ()", FUSED)),
    ),
    "after norms": (
        (BEFORE, NORMS, *FORWARD[1:]),
        (BEFORE, "q = q\nk = k", LOOKUP, ROTATED, UPDATE, CALL, AFTER),
    ),
}
"""The statements of an attention's forward, before and after its attention function is asked for its dtype."""


@pytest.mark.parametrize("name", ALONE)
def test_the_function_is_asked_before_the_rotation_and_every_value_stays(name: str) -> None:
    before, after = ALONE[name]
    arguments = Heads(2), Heads(3), Heads(4), (5, 7), 6
    with_cache = [(*arguments, Cache())] if UPDATE in before else []
    assert_becomes(attention_of(*before), "\n".join(after), arguments, *with_cache)


NOT_FOUND: dict[str, tuple[str, ...]] = {
    "q is read later": swapped(AFTER, "return output, q"),
    "q is read by a function": (BEFORE, "later = lambda: q", *FORWARD[1:]),
    "k is read in between": (*FORWARD[:2], "k = k.view(1)", *FORWARD[2:]),
    "k is the query": swapped("(self, q, k,", "(self, k, q,"),
    "k is the value too": swapped("k, v, mask", "k, k, mask"),
    "q tells the scale": swapped("scaling=self.factor", "scaling=q.value"),
    "another way without a cache": swapped(UPDATE, f"{UPDATE}\nelse:\n    k, v = k, v"),
    "another condition": swapped("cache is not None", "cache"),
    "another mask": (BEFORE, "mask = mask + 1", *FORWARD[1:]),
    "another mask by a walrus": (BEFORE, "self.order.append(mask := mask + 1)", *FORWARD[1:]),
    "a mask that the rotation's line makes": swapped("angles[1])", "angles[1], (mask := mask + 1))"),
    "another cache": (BEFORE, "cache = cache or other", *FORWARD[1:]),
    "another argument": swapped("scaling=", "sinks="),
    "values that come later": (ROTATION, BEFORE, *FORWARD[2:]),
    "values of the cache alone": (ROTATION, UPDATE, LOOKUP, CALL, AFTER),
    "a local function": (BEFORE, ROTATION, UPDATE, "function = other or attend", CALL, AFTER),
    "a function of the cache": (BEFORE, ROTATION, f"{UPDATE}\n    function = attend", LOOKUP, CALL, AFTER),
    "a method": swapped("= function(self, q", "= self.function(self, q"),
    "a condition on a local": swapped("if self.flag", "if other is None"),
    "another name beside the lookup": swapped(LOOKUP, f"angles = self.factor, 8\n{LOOKUP}"),
    "another name in the lookup": swapped(LOOKUP, f"{LOOKUP}\n    angles = self.factor, 8"),
    "another way to look it up": swapped(LOOKUP, f"{LOOKUP}\nelse:\n    angles = self.factor, 8"),
    "other further arguments": swapped(UPDATE, f"{UPDATE}\n    further = {{}}"),
    "further arguments that are computed": swapped("**further", "**dict(further)"),
    "work beside the lookup": swapped(LOOKUP, f"{LOOKUP}\nself.factor = 8"),
    "in parts": swapped("q, k, v, mask", "*(q, k, v, mask)"),
    "one rotated": swapped(ROTATION, "q, k = rotate_one(q, angles[0], angles[1]), k"),
}


@pytest.mark.parametrize("name", NOT_FOUND)
def test_what_could_tell_is_not_asked(name: str) -> None:
    patterns = patterns_of(attention_of(*NOT_FOUND[name]))
    assert {call.attention for call in patterns.rotations} == {None}


@pytest.mark.parametrize(
    ("name", "is_asked"),
    [
        *((name, True) for name in ("Qwen3", "Llama", "Gemma3", "Mistral", "Olmo2", "Granite", "Phi3", "Cohere")),
        ("GptOss", False),  # with a sink
        ("Gemma3nText", False),  # one by one
    ],
)
def test_what_attentions_of_transformers_have(name: str, is_asked: bool) -> None:
    folder = {"GptOss": "gpt_oss", "Gemma3nText": "gemma3n"}.get(name, name.lower())
    attention = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), f"{name}Attention")
    patterns = patterns_of(attention)
    assert {call.attention is not None for call in patterns.rotations} == {is_asked}
    assert all(pair.attention is patterns.rotations[0].attention for pair in patterns.heads if pair.rotation)
