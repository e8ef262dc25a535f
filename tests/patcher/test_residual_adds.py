"""The adds of a residual stream are found by dataflow, and a rewritten forward returns what the original returns."""

from __future__ import annotations

import pytest
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer

import fused_norm

from .forwards import Rewrite, assert_becomes, assert_unchanged, layer_of, patterns_of

# The module, not its source, decides what is a norm (here, `other` is none).
FUSED = {
    "Llama": (
        """
        r = a; a = self.other(a); a = r + a

        # a comment between
        r = a; a = self.norm(a); a = self.other(a); a = r + a
        return a
        """,
        """
        r = a; y0, a = self.fused_norm_add(self.norm, r, a, inner=self.other); r = a; a = y0; del y0
        a = self.fused_norm_then_add(self.other, r, a); return a
        """,
    ),
    "Gemma 2": (
        """
        r = a; a = self.norm(a); a = self.other(a); a = self.inner(a); a = r + a
        r = a; a = self.norm(a); a = self.other(a); a = self.inner(a); a = a + r
        return a
        """,
        """
        r = a; a = self.norm(a); a = self.other(a)
        y0, a = self.fused_norm_add(self.norm, r, a, inner=self.inner); r = a; a = y0; del y0
        a = self.other(a); a = self.fused_norm_then_add(self.inner, branch=a, residual=r); return a
        """,
    ),
    "scaled": (
        """
        r = a; a = r + self.other(a) * self.factor
        r = a; a = self.norm(a); a = self.factor * self.other(a) + r
        return a
        """,
        """
        r = a; y0, a = self.fused_norm_add(self.norm, r, self.other(a), scale=self.factor); r = a; a = y0
        del y0; a = self.factor * self.other(a) + r; return a
        """,
    ),
    "nested": (
        """
        if self.flag:
            with contextlib.suppress(ValueError):
                a = a + b
                b = a
                a = self.norm(a)
        return a * b
        """,
        """
        if self.flag:
            with contextlib.suppress(ValueError):
                y0, a = self.fused_norm_add(self.norm, a, b)
                b = a
                a = y0
                del y0
        return a * b
        """,
    ),
    # The vision blocks of Qwen2.5-VL are written so; here another norm follows.
    "inside calls": (
        """
        a = a + self.third(self.norm(a), *[]); a = a + self.third(x=self.other(a))
        copied = a
        return max(self.norm(a), b) - copied
        """,
        """
        y0, a = self.fused_norm_add(self.other, a, self.third(self.norm(a), *[]))
        y1, a = self.fused_norm_add(self.norm, a, self.third(x=y0)); del y0; copied = a
        return max(y1, b) - copied
        """,
    ),
    "inside arithmetic": (
        """
        a = a * b + a; scaled = self.norm(a) * (1 + b) - a; scaled = self.third(b) + scaled
        first, second = self.pair(self.other(scaled))
        return first - second * a
        """,
        """
        y0, a = self.fused_norm_add(self.norm, a * b, a); scaled = y0 * (1 + b) - a; del y0
        y1, scaled = self.fused_norm_add(self.other, branch=b, residual=scaled, inner=self.third)
        first, second = self.pair(y1); del y1; return first - second * a
        """,
    ),
    # The norm of a sum is added at once.
    "both in one statement": (
        "a = a + b; a = a + self.norm(a); return self.other(a)",
        "y0, a = self.fused_norm_add(self.norm, a, b); a = a + y0; del y0; return self.other(a)",
    ),
    "in lists": (
        "a = a + b; r = a; a = self.norms[0](a); a = r + a; r = a; a = self.norms[1](a); return r - a",
        """
        y0, a = self.fused_norm_add(self.norms[0], a, b); r = a; a = y0; del y0
        y1, a = self.fused_norm_add(self.norms[1], r, a); r = a; a = y1; del y1; return r - a
        """,
    ),
    # Gemma 3n is written so.
    "inner of another name": (
        """
        mixed = self.third(a); mixed = self.inner(mixed); gated = b + mixed; normed = self.norm(gated)
        if self.flag:
            normed = self.other(normed)
            gated = gated + normed
        return gated * 2
        """,
        """
        mixed = self.third(a); y0, gated = self.fused_norm_add(self.norm, b, mixed, inner=self.inner)
        normed = y0; del y0
        if self.flag:
            gated = self.fused_norm_then_add(self.other, gated, normed)
        return gated * 2
        """,
    ),
    # T5Gemma is written so.
    "dropout": (
        """
        r = a; a = self.other(a); a = self.inner(a); a = r + self.third(a)
        r = a; a = self.norm(a); mixed = self.inner(a * 3); a = self.third(mixed) + r
        return a * 2
        """,
        """
        r = a; a = self.other(a)
        y0, a = self.fused_norm_add(self.norm, r, a, inner=self.inner, dropout=self.third); r = a; a = y0
        del y0; a = self.fused_norm_then_add(self.inner, branch=a * 3, residual=r, dropout=self.third)
        return a * 2
        """,
    ),
    "dropout of what is read again": (
        "mixed = self.inner(a); a = a + self.third(mixed); return a * mixed",
        "mixed = self.inner(a); a = self.fused_norm_then_add(self.third, a, mixed); return a * mixed",
    ),
    # The norm reads a sum and its result goes into the next sum: it can be fused with only one of them.
    "the consumer is the inner norm": (
        "a = a + b; a = self.inner(a); a = b + a; return self.norm(a)",
        """
        y0, a = self.fused_norm_add(self.inner, a, b); a = y0; del y0
        y1, a = self.fused_norm_add(self.norm, b, a); return y1
        """,
    ),
}
"""The bodies of forwards, before and after all their adds are fused."""


@pytest.mark.parametrize("name", FUSED)
def test_the_sum_is_handed_over_and_every_value_stays(name: str) -> None:
    before, after = FUSED[name]
    assert_becomes(layer_of(before), after, (2, 3))


def test_an_add_or_a_norm_under_a_condition_becomes_a_call_under_it() -> None:
    # The Mamba layers of Zamba are written so.
    sum_or_not = layer_of(
        """
        r = a; a = a + b if b is not None else a; a = self.norm(a); a = a if b is None else self.factor * b + a
        return self.other(a) - r
        """,
        "a, b=None",
    )
    assert_becomes(
        sum_or_not,
        """
        r = a; y0, a = self.fused_norm_add(self.norm, a, b) if b is not None else (self.norm(a), a); a = y0; del y0
        y1, a = SUM if not b is None else (self.other(a), a)
        return y1 - r
        """.replace("SUM", "self.fused_norm_add(self.other, branch=b, residual=a, scale=self.factor)"),
        (2, 3),
        (2,),
    )
    # Molmo 2 and Higgs Audio 2 are written so.
    norm_or_not = """
        a = a + 5 * a; r = a
        if self.flag and not after:
            a = self.norm(a)
        a = self.third(a); a = r + a
        if b is None:
            a = 2 * a
        else:
            r = a
            a = self.other(a)
        return a - r
    """
    fused = """
        y0, a = self.fused_norm_add(self.norm, a, 5 * a) if self.flag and (not after) else (None, a + 5 * a); r = a
        if self.flag and (not after):
            a = y0
            del y0
        y1, a = SUM if not b is None else (None, self.fused_norm_then_add(self.third, r, a))
        if b is None:
            a = 2 * a
        else:
            r = a
            a = y1
            del y1
        return a - r
    """.replace("SUM", "self.fused_norm_add(self.other, r, a, inner=self.third)")
    assert_becomes(layer_of(norm_or_not, "a, b=None, after=False"), fused, (2,), (2, 3), (2, 3, True))


def test_only_what_is_asked_for_is_handed_over() -> None:
    layer = layer_of("r = a; a = self.inner(a); a = r + a; r = a; a = self.norm(a); return a")
    after = "r = a; a = self.fused_norm_then_add(self.inner, r, a); r = a; a = self.norm(a); return a"
    assert_becomes(layer, after, (2, 3), rewrites=(Rewrite("adds", 0, ("inner",)),))
    after = "r = a; a = self.inner(a); y0, a = self.fused_norm_add(self.norm, r, a); r = a; a = y0; del y0; return a"
    assert_becomes(layer, after, (2, 3), rewrites=(Rewrite("adds", 0, ("norm",)),))


LEFT_ALONE = {
    "the norm may not be called": "a = a + b; return a and self.norm(a)",
    "the condition reads the sum": """
        a = a + b; c = a
        if c:
            a = self.norm(a)
        return a
    """,
    "the other value is computed": "a = a + b if self.flag else self.third(a); return self.norm(a)",
    "the sum is replaced": "a = a + b; a = b; return self.norm(a)",
    "the sum is used between": "a = a + b; self.order.append(a); return self.norm(a)",
    "subtracts": "a = a - b; return self.norm(a)",
    "takes keywords": "a = a + b; return self.third(x=self.norm(x=a))",
    "returns more": "a = a + b; return a, b",
    "the inner is read in a function": "c = self.inner(a); a = b + c; return (lambda: a * c)()",
    "the inner is read in the next turn": """
        c = a
        for _ in range(2):
            a = a * c
            c = self.inner(a)
            a = b + c
        return a * 2
    """,
    "the inner is deleted": "c = self.inner(a); a = b + c; del c; return a * 2",
    "the inner is changed": "a = self.inner(a); a = a * 2; a = b + a; return a * 2",
    "the other operand writes": "a = Number(a); return (self.inner(a) + self.doubled(a)).value * b",
    "the inner before what reads it": "a = self.inner(a); a = (a * b) + a; return a * 2",
}
NORM_ELSEWHERE = {
    "the norm in the handler": """
        try:
            a = a + b
            b.missing()
        except AttributeError:
            a = self.norm(a)
        return a
    """,
    "the norm at last": """
        try:
            a = a + b
        finally:
            a = self.norm(a)
        return a
    """,
    "the sum of others' names": "a, b = b, a + b; return self.norm(b) * a",
}


@pytest.mark.parametrize("name", LEFT_ALONE | NORM_ELSEWHERE)
def test_what_only_resembles_the_pattern_is_left_alone(name: str) -> None:
    assert_unchanged(layer_of((LEFT_ALONE | NORM_ELSEWHERE)[name]), (2, 3))


def scaled_add(a, b):
    scale = 0.5
    return a * scale + b


class AddsInFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(24, eps=1e-5)

    def forward(self, a, b):
        a = scaled_add(a, b)
        return self.norm(a)


def test_a_sum_that_a_function_returns_is_left_alone() -> None:
    report = fused_norm.apply_fused_norm(AddsInFunctions())
    assert [(site.path, site.kind) for site in report.rows] == [("norm", "norm")]


@pytest.mark.parametrize(
    ("layer", "adds"),
    [
        (LlamaDecoderLayer, [("post_attention_layernorm", None, None), (None, "mlp", None)]),
        (
            Olmo2DecoderLayer,
            [("mlp", "post_attention_layernorm", None), (None, "post_feedforward_layernorm", None)],
        ),
    ],
)
def test_families_go_by_dataflow_not_by_name(layer: type, adds: list[tuple]) -> None:
    assert [add.names for add in patterns_of(layer).adds] == adds


def test_operands_are_computed_in_their_order() -> None:
    """Modules in both branches that draw random numbers, like dropout, draw them in stock's order."""
    before = """
        a = self.third(self.gate(a)) + self.up(b) * 2; b = self.norm(a)
        a = self.factor * self.up(a) + self.gate(b) * 2; b = self.norm(a)
        return self.inner(self.up(a)) + self.gate(b) * 2
    """
    after = """
        y0, a = self.fused_norm_add(self.norm, branch=self.gate(a), residual=self.up(b) * 2, inner=self.third); b = y0
        del y0
        y1, a = self.fused_norm_add(self.norm, branch=self.up(a), residual=self.gate(b) * 2, scale=self.factor); b = y1
        del y1; return self.fused_norm_then_add(self.inner, branch=self.up(a), residual=self.gate(b) * 2)
    """
    assert_becomes(layer_of(before), after, (2, 3), in_order=True)
