"""The adds of a residual stream are found by dataflow, and a rewritten forward returns what the original returns."""

# ruff: noqa: RET504

from __future__ import annotations

import contextlib
import weakref

import pytest
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer
from transformers.models.granite.modeling_granite import GraniteDecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer

import fused_norm
from fused_norm.patcher.patterns import patterns_of, rewritten_forward
from fused_norm.patcher.patterns.calls import Rewrite

from .forwards import Recorder, everything, run


def adds_of(layer: type) -> list[tuple[str | None, str | None, str | None]]:
    """The norms after and before each add that is found in a forward."""
    return [add.names for add in patterns_of(layer).adds]


class Llama(Recorder):
    def forward(self, h):
        residual = h
        h = self.other(h)
        h = residual + h

        # a comment between
        residual = h
        h = self.norm(h)
        h = self.other(h)
        h = residual + h
        return h


class Gemma2(Recorder):
    def forward(self, h):
        residual = h
        h = self.norm(h)
        h = self.other(h)
        h = self.inner(h)
        h = residual + h

        residual = h
        h = self.norm(h)
        h = self.other(h)
        h = self.inner(h)
        h = h + residual
        return h


class Inline(Recorder):
    def forward(self, h):
        h = h + self.inner(self.other(h))
        h = self.inner(h * 2) + h
        residual = h
        h = self.norm(h)
        return residual * h


class Returned(Recorder):
    def forward(self, h):
        residual = h
        h = self.inner(self.other(h))
        return residual + h


class ReturnedInline(Recorder):
    def forward(self, h):
        h = self.other(h)
        return self.inner(h * 2) + h


class OnlyInner(Recorder):
    def forward(self, h):
        residual = h
        h = self.other(h)
        h = self.inner(h)
        h = residual + h
        return h * 2


class Scaled(Recorder):
    def forward(self, h):
        residual = h
        h = residual + self.other(h) * self.factor
        residual = h
        h = self.norm(h)
        h = self.factor * self.other(h) + residual
        return h


class BothScaled(Recorder):
    def forward(self, a, b):
        a = self.factor * a + b * self.factor
        return self.norm(a)


class OtherNames(Recorder):
    def forward(self, a, b=2, *, c: float = 1):
        total = self.other(a) * c + b * a
        kept = also = total
        y = self.norm(total)
        return y + kept * also


class Nested(Recorder):
    def forward(self, a, b):
        if self.flag:
            with contextlib.suppress(ValueError):
                a = a + b
                b = a
                a = self.norm(a)
        else:
            a = b + b
            a = self.other(a)
        return a * b


class SeveralAdds(Recorder):
    def forward(self, a, b):
        a = a + b
        a = self.norm(a)
        a = a + b
        a = self.other(a)
        a = b * a + b
        return self.norm(a)


class InsideCalls(Recorder):
    """As in the vision blocks of Qwen2.5-VL, with another norm at the end."""

    def forward(self, h, factor):
        h = h + self.third(self.norm(h), *[])
        h = h + self.third(x=self.other(h))
        copied = h
        return max(self.norm(h), factor) - copied


class InsideArithmetic(Recorder):
    def forward(self, h, shift):
        h = h * shift + h
        scaled = self.norm(h) * (1 + shift) - h
        scaled = self.third(shift) + scaled
        first, second = self.pair(self.other(scaled))
        return first - second * h


class InACase(Recorder):
    def forward(self, a, b):
        match self.factor:
            case 7:
                a = a + b
                a = self.norm(a)
            case _:
                a = b
        return a


class BothInOneStatement(Recorder):
    """What a sum's norm returns is added at once."""

    def forward(self, a, b):
        a = a + b
        a = a + self.norm(a)
        return self.other(a)


class InLists(Recorder):
    def forward(self, h, b):
        h = h + b
        residual = h
        h = self.norms[0](h)
        h = residual + h
        residual = h
        h = self.norms[1](h)
        return residual - h


class SumOrNot(Recorder):
    """As in the Mamba layers of Zamba."""

    def forward(self, h, b=None):
        residual = h
        h = h + b if b is not None else h
        h = self.norm(h)
        h = h if b is None else self.factor * b + h
        return self.other(h) - residual


class NormOrNot(Recorder):
    """As in Molmo 2 and Higgs Audio 2."""

    def forward(self, h, b=None, after=False):
        h = h + 5
        residual = h
        if self.flag and not after:
            h = self.norm(h)
        h = self.third(h)
        h = residual + h
        if b is None:
            h = 2 * h
        else:
            residual = h
            h = self.other(h)
        return h - residual


class InnerOfAnotherName(Recorder):
    """As in Gemma 3n."""

    def forward(self, h, active):
        made = self.third(h)
        made = self.inner(made)
        gated = active + made
        normed = self.norm(gated)
        if self.flag:
            normed = self.other(normed)
            gated = gated + normed
        return gated * 2


class Dropout(Recorder):
    """As in T5Gemma."""

    def forward(self, h):
        residual = h
        h = self.other(h)
        h = self.inner(h)
        h = residual + self.third(h)
        residual = h
        h = self.norm(h)
        made = self.inner(h * 3)
        h = self.third(made) + residual
        return h * 2


class DropoutOfMore(Recorder):
    """What goes into it is read again."""

    def forward(self, h):
        made = self.inner(h)
        h = h + self.third(made)
        return h * made


class ConsumerIsInner(Recorder):
    """The norm takes one sum and its result goes into the next: it can be fused with one of them."""

    def forward(self, a, b):
        a = a + b
        a = self.inner(a)
        a = b + a
        return self.norm(a)


@pytest.mark.parametrize(
    ("layer", "adds", "calls", "arguments"),
    [
        # What is a norm and what is not (here, `other`) is asked of the module, not of its source.
        (Llama, [("norm", "other", None), (None, "other", None)], ["add norm other 1", "onto other"], (2,)),
        (Gemma2, [("norm", "inner", None), (None, "inner", None)], ["add norm inner 1", "onto inner"], (2,)),
        (
            Inline,
            [(None, "inner", None), ("norm", "inner", None)],
            ["onto inner", "add norm inner 1"],
            (2,),
        ),
        (OnlyInner, [(None, "inner", None)], ["onto inner"], (2,)),
        (Returned, [(None, "inner", None)], ["onto inner"], (2,)),
        (ReturnedInline, [(None, "inner", None)], ["onto inner"], (2,)),
        (Scaled, [("norm", None, None)], ["add norm None 7"], (2,)),
        (BothScaled, [("norm", None, None)], ["add norm None 7"], (2, 3)),
        (OtherNames, [("norm", None, None)], ["add norm None 1"], (2,)),
        (Nested, [("norm", None, None), ("other", None, None)], ["add norm None 1"], (2, 3)),
        (
            SeveralAdds,
            [("norm", None, None), ("other", None, None), ("norm", None, None)],
            ["add norm None 1", "add other None 1", "add norm None 1"],
            (2, 3),
        ),
        (
            InsideCalls,
            [("other", None, None), ("norm", None, None)],
            ["add other None 1", "add norm None 1"],
            (2, 3),
        ),
        (
            InsideArithmetic,
            [("norm", None, None), ("other", "third", None)],
            ["add norm None 1", "add other third 1"],
            (2, 3),
        ),
        (InACase, [("norm", None, None)], ["add norm None 1"], (2, 3)),
        (BothInOneStatement, [("norm", None, None)], ["add norm None 1"], (2, 3)),
        (InLists, [("norms.0", None, None), ("norms.1", None, None)], ["add norm None 1", "add other None 1"], (2, 3)),
        (SumOrNot, [("norm", None, None), ("other", None, None)], ["add norm None 1", "add other None 7"], (2, 3)),
        (SumOrNot, [("norm", None, None), ("other", None, None)], [], (2,)),
        (NormOrNot, [("norm", None, None), ("other", "third", None)], ["add norm None 1", "onto third"], (2,)),
        (NormOrNot, [("norm", None, None), ("other", "third", None)], ["add norm None 1", "add other third 1"], (2, 3)),
        (NormOrNot, [("norm", None, None), ("other", "third", None)], ["add other third 1"], (2, 3, True)),
        (
            InnerOfAnotherName,
            [("norm", "inner", None), (None, "other", None)],
            ["add norm inner 1", "onto other"],
            (2, 3),
        ),
        (
            Dropout,
            [("norm", "third", "inner"), (None, "third", "inner")],
            ["add norm inner 1", "onto inner"],
            (2,),
        ),
        (DropoutOfMore, [(None, "third", None)], ["onto third"], (2,)),
        (
            ConsumerIsInner,
            [("inner", None, None), ("norm", None, None)],
            ["add inner None 1", "add norm None 1"],
            (2, 3),
        ),
    ],
)
def test_the_sum_is_handed_over_and_every_value_stays(layer, adds, calls, arguments) -> None:
    assert adds_of(layer) == adds
    assert run(layer, *arguments) == calls


def test_only_what_is_asked_for_is_handed_over() -> None:
    assert run(SeveralAdds, 2, 3, rewrites=(Rewrite("adds", 2, ("norm",)),)) == ["add norm None 1"]
    assert run(Gemma2, 2, rewrites=(Rewrite("adds", 0, ("inner",)),)) == ["onto inner"]
    assert run(Gemma2, 2, rewrites=(Rewrite("adds", 0, ("norm",)),)) == ["add norm None 1"]
    assert run(Gemma2, 2, rewrites=(Rewrite("adds", 1, ("inner",)),)) == ["onto inner"]


class SumIsChanged(Recorder):
    def forward(self, a, b):
        a = a + b
        a = 2 * a
        return self.norm(a)


class SumIsCalledWithFirst(Recorder):
    def forward(self, a, b):
        a = a + b
        return max(a, b) * self.norm(a)


class NormMayNotBeCalled(Recorder):
    def forward(self, a, b):
        a = a + b
        return a and self.norm(a)


class ConditionIsComputed(Recorder):
    def forward(self, a, b):
        a = a + b
        if self.third(b):
            a = self.norm(a)
        return a


class ConditionReadsTheSum(Recorder):
    def forward(self, a, b):
        a = a + b
        c = a
        if c:
            a = self.norm(a)
        return a


class OtherIsComputed(Recorder):
    def forward(self, a, b):
        a = a + b if self.flag else self.third(a)
        return self.norm(a)


class NumberIsComputed(Recorder):
    def forward(self, a, b):
        a = a + b
        return self.norms[b](a)


class SumIsReplaced(Recorder):
    def forward(self, a, b):
        a = a + b
        a = b
        return self.norm(a)


class SumIsUsedBetween(Recorder):
    def forward(self, a, b):
        a = a + b
        self.calls.append(a)
        self.calls.clear()
        return self.norm(a)


class InPlace(Recorder):
    def forward(self, a, b):
        a += b
        return self.norm(a)


class Subtracts(Recorder):
    def forward(self, a, b):
        a = a - b
        return self.norm(a)


class NormOfAnother(Recorder):
    def forward(self, a, b):
        c = a + b
        a = self.norm(a)
        return a * c


class TakesMore(Recorder):
    def forward(self, a, b):
        a = a + b
        return max(2 * b, self.norm(a))


class TakesKeywords(Recorder):
    def forward(self, a, b):
        a = a + b
        return self.third(x=self.norm(x=a))


class Unpacks(Recorder):
    def forward(self, a, b):
        a = a + b
        a, b = self.pair(a)
        return a * b


class InnerFunction(Recorder):
    def forward(self, a, b):
        def inner(a, b):
            a = a + b
            return self.norm(a)

        return a - b


class ReturnsTuple(Recorder):
    def forward(self, a, b):
        a = a + b
        outputs = (a,)
        return outputs


class ReturnsMore(Recorder):
    def forward(self, a, b):
        a = a + b
        return a, b


class ReturnsExpression(Recorder):
    def forward(self, a, b):
        return a + b


class InnerIsReadAgain(Recorder):
    def forward(self, a, b):
        c = self.inner(a)
        a = b + c
        return a * c


class InnerIsReadInAFunction(Recorder):
    def forward(self, a, b):
        c = self.inner(a)
        a = b + c
        return (lambda: a * c)()


class InnerIsReadInTheNextTurn(Recorder):
    def forward(self, a, b):
        c = a
        for _ in range(2):
            a = a * c
            c = self.inner(a)
            a = b + c
        return a * 2


class InnerIsChanged(Recorder):
    def forward(self, a, b):
        a = self.inner(a)
        a = a * 2
        a = b + a
        return a * 2


class InnerOnBothSides(Recorder):
    def forward(self, a):
        a = self.inner(a)
        a = a + a
        return a * 2


class InnerBeforeOneThatReadsIt(Recorder):
    def forward(self, a, b):
        a = self.inner(a)
        a = (a * b) + a
        return a * 2


class NormInTheHandler(Recorder):
    def forward(self, a, b):
        try:
            a = a + b
            b.missing()
        except AttributeError:
            a = self.norm(a)
        return a


class NormAtLast(Recorder):
    def forward(self, a, b):
        try:
            a = a + b
        finally:
            a = self.norm(a)
        return a


class SumOfOthersNames(Recorder):
    def forward(self, a, b):
        a, b = b, a + b
        return self.norm(b) * a


class SumAsAnotherType(Recorder):
    def forward(self, a, b):
        return self.norm((a + b).conjugate())


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


@pytest.mark.parametrize(
    ("layer", "arguments"),
    [
        (SumIsChanged, (2, 3)),
        (SumIsCalledWithFirst, (2, 3)),
        (NormMayNotBeCalled, (2, 3)),
        (ConditionIsComputed, (2, 3)),
        (ConditionReadsTheSum, (2, 3)),
        (OtherIsComputed, (2, 3)),
        (NumberIsComputed, (2, 1)),
        (SumIsReplaced, (2, 3)),
        (SumIsUsedBetween, (2, 3)),
        (InPlace, (2, 3)),
        (Subtracts, (2, 3)),
        (NormOfAnother, (2, 3)),
        (TakesMore, (2, 3)),
        (TakesKeywords, (2, 3)),
        (Unpacks, (2, 3)),
        (InnerFunction, (2, 3)),
        (ReturnsTuple, (2, 3)),
        (ReturnsMore, (2, 3)),
        (ReturnsExpression, (2, 3)),
        (InnerIsReadAgain, (2, 3)),
        (InnerIsReadInAFunction, (2, 3)),
        (InnerIsReadInTheNextTurn, (2, 3)),
        (InnerIsChanged, (2, 3)),
        (InnerOnBothSides, (2,)),
        (InnerBeforeOneThatReadsIt, (2, 3)),
        (NormInTheHandler, (2, 3)),
        (NormAtLast, (2, 3)),
        (SumOfOthersNames, (2, 3)),
        (SumAsAnotherType, (2, 3)),
        (OtherOperandWrites, (2, 3)),
    ],
)
def test_what_only_resembles_the_pattern_is_left_alone(layer, arguments) -> None:
    assert adds_of(layer) == []
    assert run(layer, *arguments) == []


class Missed(Recorder):
    """Sums that reach a norm in other ways than are fused."""

    def forward(self, a, b):
        a += b
        a = self.norm(a)
        if self.flag:
            a = b + a
        a = self.other(a)
        c = self.third(a + b)
        a = c + a
        for _ in range(2):
            d = self.inner(a)
            a = a + 2
        if not self.factor:
            a = self.third(a)
            a = b + a
        with contextlib.suppress(ValueError):
            b = a - b
            return self.norm(b) * d
        return self.act(a)


class MissedInOtherForms(Recorder):
    def forward(self, a, b):
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


class MissedInMoreForms(Recorder):
    def forward(self, a, b):
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


def test_sums_that_reach_a_norm_in_another_way_are_found() -> None:
    missed = [(one.norm, one.source, one.conditions) for one in patterns_of(Missed).missed_adds]
    assert missed == [
        ("norm", "a += b", ()),
        ("other", "b + a", (("flag", True),)),
        ("third", "a + b", ()),
        ("inner", "c + a", ()),
        ("inner", "a + 2", ()),
        ("third", "c + a", (("factor", False),)),
        ("third", "a + 2", (("factor", False),)),
        ("act", "c + a", ()),
        ("act", "a + 2", ()),
        ("act", "b + a", (("factor", False),)),
    ]
    missed = [(one.norm, one.source, one.conditions) for one in patterns_of(MissedInOtherForms).missed_adds]
    assert missed == [
        ("norm", "a + b", ()),
        ("other", "a + b", ()),
        ("third", "c + d", ()),
        ("inner", "a.add(b)", ()),
        ("act", "d.add_(c)", ()),
        ("norms.*", "b + d", ()),
        ("norms.-1", "b + d", ()),
    ]
    missed = [(one.norm, one.source, one.conditions) for one in patterns_of(BothInOneStatement).missed_adds]
    assert missed == [("other", "a + self.norm(a)", ())]
    missed = [(one.norm, one.source) for one in patterns_of(MissedInMoreForms).missed_adds]
    assert missed == [("norm", "a + b"), ("other", "sum((a, b))"), ("third", "a + b"), ("inner", "a + c")]
    for layer, source in ((NormInTheHandler, "a + b"), (NormAtLast, "a + b"), (SumOfOthersNames, "a + b")):
        assert [(one.norm, one.source) for one in patterns_of(layer).missed_adds] == [("norm", source)]
    for layer in (InsideCalls, InLists, SumOrNot, Nested):
        assert patterns_of(layer).missed_adds == []


def test_families_go_by_dataflow_not_by_name() -> None:
    assert adds_of(LlamaDecoderLayer) == [
        ("post_attention_layernorm", None, None),
        (None, "mlp", None),
    ]
    assert adds_of(GraniteDecoderLayer) == [("post_attention_layernorm", None, None)]
    assert adds_of(Gemma2DecoderLayer) == [
        ("pre_feedforward_layernorm", "post_attention_layernorm", None),
        (None, "post_feedforward_layernorm", None),
    ]
    assert adds_of(Olmo2DecoderLayer) == [
        ("mlp", "post_attention_layernorm", None),
        (None, "post_feedforward_layernorm", None),
    ]


class InOrder(Recorder):
    """Either operand of an add may be the branch; ``gate`` and ``up`` note when they are called."""

    def forward(self, a, b):
        a = self.third(self.gate(a)) + self.up(b) * 2
        b = self.norm(a)
        a = self.factor * self.up(a) + self.gate(b) * 2
        b = self.norm(a)
        a = self.inner(self.gate(a)) + self.up(b) * 2
        b = self.norm(a)
        return self.inner(self.up(a)) + self.gate(b) * 2


@pytest.mark.parametrize("inner", [False, True])
def test_operands_are_computed_in_their_order(inner: bool) -> None:
    """What draws random numbers in both, as dropout does, draws them as in stock."""
    parts = ("norm", "inner") if inner else ("norm",)
    rewrites = tuple(Rewrite("adds", index, parts) for index in range(len(patterns_of(InOrder).adds)))
    assert len(run(InOrder, 2, 3, rewrites=rewrites, may_postpone=False)) == 3 + inner


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
