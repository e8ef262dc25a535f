"""The adds of a residual stream are found by dataflow, and a rewritten forward returns what the original returns."""

from __future__ import annotations

import weakref

import pytest
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer
from transformers.models.granite.modeling_granite import GraniteDecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer

import fused_norm
from fused_norm.patcher.patterns import patterns_of, rewritten_forward
from fused_norm.patcher.rewrite import Rewrite

from .forwards import Recorder, everything, layer_of, run


def adds_of(layer: type) -> list[str]:
    """The norms after and before each add that is found in a forward, and the dropout: ``-`` where there is none."""
    return [" ".join(name or "-" for name in add.names).rstrip(" -") for add in patterns_of(layer).adds]


# What is a norm and what is not (here, `other`) is asked of the module, not of its source.
FUSED = {
    "Llama": (
        """
        r = a; a = self.other(a); a = r + a

        # a comment between
        r = a; a = self.norm(a); a = self.other(a); a = r + a
        return a
        """,
        ["norm other", "- other"],
        ["add norm other 1", "onto other"],
    ),
    "Gemma 2": (
        """
        r = a; a = self.norm(a); a = self.other(a); a = self.inner(a); a = r + a
        r = a; a = self.norm(a); a = self.other(a); a = self.inner(a); a = a + r
        return a
        """,
        ["norm inner", "- inner"],
        ["add norm inner 1", "onto inner"],
    ),
    "inline": (
        """
        a = a + self.inner(self.other(a)); a = self.inner(a * 2) + a
        r = a; a = self.norm(a)
        return r * a
        """,
        ["- inner", "norm inner"],
        ["onto inner", "add norm inner 1"],
    ),
    "no norm after": (
        "r = a; a = self.other(a); a = self.inner(a); a = r + a; return a * 2",
        ["- inner"],
        ["onto inner"],
    ),
    "returned": ("r = a; a = self.inner(self.other(a)); return r + a", ["- inner"], ["onto inner"]),
    "returned inline": ("a = self.other(a); return self.inner(a * 2) + a", ["- inner"], ["onto inner"]),
    "scaled": (
        """
        r = a; a = r + self.other(a) * self.factor
        r = a; a = self.norm(a); a = self.factor * self.other(a) + r
        return a
        """,
        ["norm"],
        ["add norm None 7"],
    ),
    "both scaled": ("a = self.factor * a + b * self.factor; return self.norm(a)", ["norm"], ["add norm None 7"]),
    "other names": (
        """
        total = self.other(a) * 5 + b * a; kept = also = total
        y = self.norm(total)
        return y + kept * also
        """,
        ["norm"],
        ["add norm None 1"],
    ),
    "nested": (
        """
        if self.flag:
            with contextlib.suppress(ValueError):
                a = a + b
                b = a
                a = self.norm(a)
        else:
            a = b + b
            a = self.other(a)
        return a * b
        """,
        ["norm", "other"],
        ["add norm None 1"],
    ),
    "several": (
        "a = a + b; a = self.norm(a); a = a + b; a = self.other(a); a = b * a + b; return self.norm(a)",
        ["norm", "other", "norm"],
        ["add norm None 1", "add other None 1", "add norm None 1"],
    ),
    # As in the vision blocks of Qwen2.5-VL, with another norm at the end.
    "inside calls": (
        """
        a = a + self.third(self.norm(a), *[]); a = a + self.third(x=self.other(a))
        copied = a
        return max(self.norm(a), b) - copied
        """,
        ["other", "norm"],
        ["add other None 1", "add norm None 1"],
    ),
    "inside arithmetic": (
        """
        a = a * b + a; scaled = self.norm(a) * (1 + b) - a; scaled = self.third(b) + scaled
        first, second = self.pair(self.other(scaled))
        return first - second * a
        """,
        ["norm", "other third"],
        ["add norm None 1", "add other third 1"],
    ),
    "in a case": (
        """
        match self.factor:
            case 7:
                a = a + b
                a = self.norm(a)
            case _:
                a = b
        return a
        """,
        ["norm"],
        ["add norm None 1"],
    ),
    # What a sum's norm returns is added at once.
    "both in one statement": ("a = a + b; a = a + self.norm(a); return self.other(a)", ["norm"], ["add norm None 1"]),
    "in lists": (
        "a = a + b; r = a; a = self.norms[0](a); a = r + a; r = a; a = self.norms[1](a); return r - a",
        ["norms.0", "norms.1"],
        ["add norm None 1", "add other None 1"],
    ),
    # As in Gemma 3n.
    "inner of another name": (
        """
        made = self.third(a); made = self.inner(made); gated = b + made; normed = self.norm(gated)
        if self.flag:
            normed = self.other(normed)
            gated = gated + normed
        return gated * 2
        """,
        ["norm inner", "- other"],
        ["add norm inner 1", "onto other"],
    ),
    # As in T5Gemma.
    "dropout": (
        """
        r = a; a = self.other(a); a = self.inner(a); a = r + self.third(a)
        r = a; a = self.norm(a); made = self.inner(a * 3); a = self.third(made) + r
        return a * 2
        """,
        ["norm third inner", "- third inner"],
        ["add norm inner 1", "onto inner"],
    ),
    "dropout of what is read again": (
        "made = self.inner(a); a = a + self.third(made); return a * made",
        ["- third"],
        ["onto third"],
    ),
    # The norm takes one sum and its result goes into the next: it can be fused with one of them.
    "the consumer is the inner norm": (
        "a = a + b; a = self.inner(a); a = b + a; return self.norm(a)",
        ["inner", "norm"],
        ["add inner None 1", "add norm None 1"],
    ),
}
"""The body of a forward, the adds that are found in it, and its calls when all of them are fused."""


@pytest.mark.parametrize("name", FUSED)
def test_the_sum_is_handed_over_and_every_value_stays(name: str) -> None:
    body, adds, calls = FUSED[name]
    layer = layer_of(body)
    assert adds_of(layer) == adds
    assert run(layer, 2, 3) == calls


def test_an_add_or_a_norm_under_a_condition_becomes_a_call_under_it() -> None:
    # As in the Mamba layers of Zamba.
    sum_or_not = layer_of(
        """
        r = a; a = a + b if b is not None else a; a = self.norm(a); a = a if b is None else self.factor * b + a
        return self.other(a) - r
        """,
        "a, b=None",
    )
    assert adds_of(sum_or_not) == ["norm", "other"]
    assert patterns_of(sum_or_not).missed_adds == []
    assert run(sum_or_not, 2, 3) == ["add norm None 1", "add other None 7"]
    assert run(sum_or_not, 2) == []
    # As in Molmo 2 and Higgs Audio 2.
    norm_or_not = layer_of(
        """
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
        """,
        "a, b=None, after=False",
    )
    assert adds_of(norm_or_not) == ["norm", "other third"]
    assert run(norm_or_not, 2) == ["add norm None 1", "onto third"]
    assert run(norm_or_not, 2, 3) == ["add norm None 1", "add other third 1"]
    assert run(norm_or_not, 2, 3, True) == ["add other third 1"]


def test_only_what_is_asked_for_is_handed_over() -> None:
    several, gemma2 = (layer_of(FUSED[name][0]) for name in ("several", "Gemma 2"))
    assert run(several, 2, 3, rewrites=(Rewrite("adds", 2, ("norm",)),)) == ["add norm None 1"]
    assert run(gemma2, 2, 3, rewrites=(Rewrite("adds", 0, ("inner",)),)) == ["onto inner"]
    assert run(gemma2, 2, 3, rewrites=(Rewrite("adds", 0, ("norm",)),)) == ["add norm None 1"]
    assert run(gemma2, 2, 3, rewrites=(Rewrite("adds", 1, ("inner",)),)) == ["onto inner"]


LEFT_ALONE = {
    "the sum is changed": "a = a + b; a = 2 * a; return self.norm(a)",
    "the sum is called with first": "a = a + b; return max(a, b) * self.norm(a)",
    "the norm may not be called": "a = a + b; return a and self.norm(a)",
    "the condition is computed": """
        a = a + b
        if self.third(b):
            a = self.norm(a)
        return a
    """,
    "the condition reads the sum": """
        a = a + b; c = a
        if c:
            a = self.norm(a)
        return a
    """,
    "the other value is computed": "a = a + b if self.flag else self.third(a); return self.norm(a)",
    "the number is computed": "a = a + b; return self.norms[b - 2](a)",
    "the sum is replaced": "a = a + b; a = b; return self.norm(a)",
    "the sum is used between": "a = a + b; self.calls.append(a); self.calls.clear(); return self.norm(a)",
    "in place": "a += b; return self.norm(a)",
    "subtracts": "a = a - b; return self.norm(a)",
    "the norm of another": "c = a + b; a = self.norm(a); return a * c",
    "takes more": "a = a + b; return max(2 * b, self.norm(a))",
    "takes keywords": "a = a + b; return self.third(x=self.norm(x=a))",
    "unpacks": "a = a + b; a, b = self.pair(a); return a * b",
    "an inner function": """
        def inner(a, b):
            a = a + b
            return self.norm(a)

        return a - b
    """,
    "returns a tuple": "a = a + b; outputs = (a,); return outputs",
    "returns more": "a = a + b; return a, b",
    "returns the sum": "return a + b",
    "the inner is read again": "c = self.inner(a); a = b + c; return a * c",
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
    "the inner on both sides": "a = self.inner(a); a = a + a; return a * 2",
    "the inner before what reads it": "a = self.inner(a); a = (a * b) + a; return a * 2",
    "the sum as another type": "return self.norm((a + b).conjugate())",
}
NORM_MISSED = {
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


class OtherOperandWrites(Recorder):
    """What the inner norm takes is written into before a fused call would take it."""

    def forward(self, a, b):
        a = [a]
        c = self.first(a) + self.emptied(a, 0)
        return c * b

    def first(self, a):
        return a[0]

    def emptied(self, a, index):
        return a.pop(index)


@pytest.mark.parametrize("layer", [*LEFT_ALONE, *NORM_MISSED, OtherOperandWrites])
def test_what_only_resembles_the_pattern_is_left_alone(layer: str | type) -> None:
    layer = layer_of((LEFT_ALONE | NORM_MISSED)[layer]) if isinstance(layer, str) else layer
    assert adds_of(layer) == []
    assert run(layer, 2, 3) == []


MISSED = (
    (
        """
        a += b
        a = self.norm(a)
        if self.flag:
            a = b + a
        a = self.other(a)
        c = self.third(a + b)
        a = c + a
        for _ in range(2):
            d = self.inner(a)
            a = a + d
        if not self.factor:
            a = self.third(a)
            a = b + a
        with contextlib.suppress(ValueError):
            b = a - b
            return self.norm(b) * d
        return self.act(a)
        """,
        "norm: a += b; other: b + a if self.flag; third: a + b; inner: c + a; inner: a + d; "
        "third: c + a if not self.factor; third: a + d if not self.factor; act: c + a; act: a + d; "
        "act: b + a if not self.factor",
    ),
    (
        """
        c = self.norm(d := a + b)
        c, d = self.other(d), c + d
        c = self.third(x=d)
        d = a.add(b)
        c = self.inner(d.float())
        d.add_(c)
        d = self.act(d)
        if self.training:
            c = b + d
        for i in range(2):
            d = self.norms[i](c)
        return self.norms[-1](c)
        """,
        "norm: a + b; other: a + b; third: c + d; inner: a.add(b); act: d.add_(c); norms.*: b + d; norms.-1: b + d",
    ),
    (
        """
        c = self.norm((a + b).type_as(a))
        c = self.other(sum((a, b)))
        match self.flag:
            case True:
                c = a + b
            case a:
                c = a
        c = self.third(c * 1 if self.flag else c)
        a = a + c if self.flag else self.act(c)
        return self.inner(a)
        """,
        "norm: a + b; other: sum((a, b)); third: a + b; inner: a + c if self.flag",
    ),
    (FUSED["both in one statement"][0], "other: a + self.norm(a)"),
    *((body, "norm: a + b") for body in NORM_MISSED.values()),
    *((FUSED[name][0], "") for name in ("inside calls", "in lists", "nested")),
)
"""Forwards, and the sums that reach a norm in other ways than are fused, with the conditions under which they do."""


@pytest.mark.parametrize(("body", "expected"), MISSED)
def test_sums_that_reach_a_norm_in_another_way_are_found(body: str, expected: str) -> None:
    missed = []
    for one in patterns_of(layer_of(body)).missed_adds:
        conditions = "".join(f" if {'' if holds else 'not '}{name}" for name, holds in one.conditions)
        missed.append(f"{one.called.name}: {one.source}{conditions}")
    assert "; ".join(missed) == expected


def scaled_add(a, b):
    scale = 0.5
    return a * scale + b


def product(a, b):
    a = a + b
    return a * b


class MadeElsewhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.RMSNorm(24, eps=1e-5), nn.RMSNorm(24, eps=1e-5)

    def forward(self, a, b):
        a = scaled_add(a, b)
        a = self.norm(a)
        b = product(a, b)
        return self.other(b) * a


def test_a_sum_that_a_function_returns_is_found() -> None:
    report = fused_norm.apply_fused_norm(MadeElsewhere())
    rows = [(site.path, site.reason) for site in (*report.fused, *report.kept) if site.kind == "residual"]
    assert rows == [("norm", "its sum, scaled_add(a, b), reaches it in a way that is not rewritten")]


@pytest.mark.parametrize(
    ("layer", "adds"),
    [
        (LlamaDecoderLayer, ["post_attention_layernorm", "- mlp"]),
        (GraniteDecoderLayer, ["post_attention_layernorm"]),
        (Gemma2DecoderLayer, ["pre_feedforward_layernorm post_attention_layernorm", "- post_feedforward_layernorm"]),
        (Olmo2DecoderLayer, ["mlp post_attention_layernorm", "- post_feedforward_layernorm"]),
    ],
)
def test_families_go_by_dataflow_not_by_name(layer: type, adds: list[str]) -> None:
    assert adds_of(layer) == adds


# Either operand of an add may be the branch; `gate` and `up` note when they are called.
IN_ORDER = """
    a = self.third(self.gate(a)) + self.up(b) * 2; b = self.norm(a)
    a = self.factor * self.up(a) + self.gate(b) * 2; b = self.norm(a)
    a = self.inner(self.gate(a)) + self.up(b) * 2; b = self.norm(a)
    return self.inner(self.up(a)) + self.gate(b) * 2
"""


@pytest.mark.parametrize("inner", [False, True])
def test_operands_are_computed_in_their_order(inner: bool) -> None:
    """What draws random numbers in both, as dropout does, draws them as in stock."""
    layer, parts = layer_of(IN_ORDER), ("norm", "inner") if inner else ("norm",)
    rewrites = tuple(Rewrite("adds", index, parts) for index in range(len(adds_of(layer))))
    assert len(run(layer, 2, 3, rewrites=rewrites, in_order=True)) == 3 + inner


class Held:
    """A number, which shows by a weak reference whether anything still holds it."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __add__(self, other: Held) -> Held:
        return Held(self.value + other.value)

    def __mul__(self, factor: int) -> Held:
        return Held(self.value * factor)


class Frees(Recorder):
    """What a norm returns is gone once its name holds something else."""

    def norm(self, x):
        y = Held(x.value * 3)
        self.made = weakref.ref(y)
        return y

    def forward(self, a, b):
        a = a + b
        c = self.norm(a)
        c = c.value
        return c, self.made() is None


def test_the_result_of_a_norm_lives_no_longer_than_in_stock() -> None:
    (rewrite,) = everything(Frees)
    for forward in (Frees.forward, rewritten_forward(Frees, (rewrite,))):
        assert forward(Frees(), Held(2), Held(3)) == (15, True)
