"""The adds of a residual stream are found by dataflow, and a rewritten forward returns what the original returns."""

# ruff: noqa: RET504

from __future__ import annotations

import contextlib

import pytest
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer
from transformers.models.granite.modeling_granite import GraniteDecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer

from fused_norm.patcher.forward_rewrite import patterns_of
from fused_norm.patcher.residual_adds import Add, AddRewrite

from .forwards import Recorder, run


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
        (Llama, [Add("norm", "other"), Add(None, "other")], ["add norm other 1", "onto other"], (2,)),
        (Gemma2, [Add("norm", "inner"), Add(None, "inner")], ["add norm inner 1", "onto inner"], (2,)),
        (
            Inline,
            [Add(None, "inner"), Add("norm", "inner")],
            ["onto inner", "add norm inner 1"],
            (2,),
        ),
        (OnlyInner, [Add(None, "inner")], ["onto inner"], (2,)),
        (Scaled, [Add("norm", None)], ["add norm None 7"], (2,)),
        (BothScaled, [Add("norm", None)], ["add norm None 7"], (2, 3)),
        (OtherNames, [Add("norm", None)], ["add norm None 1"], (2,)),
        (Nested, [Add("norm", None), Add("other", None)], ["add norm None 1"], (2, 3)),
        (
            SeveralAdds,
            [Add("norm", None), Add("other", None), Add("norm", None)],
            ["add norm None 1", "add other None 1", "add norm None 1"],
            (2, 3),
        ),
        (
            ConsumerIsInner,
            [Add("inner", None), Add("norm", None)],
            ["add inner None 1", "add norm None 1"],
            (2, 3),
        ),
    ],
)
def test_the_sum_is_handed_over_and_every_value_stays(layer, adds, calls, arguments) -> None:
    assert list(patterns_of(layer).adds) == adds
    assert run(layer, *arguments) == calls


def test_only_what_is_asked_for_is_handed_over() -> None:
    assert run(SeveralAdds, 2, 3, rewrites=(AddRewrite(2, True, False),)) == ["add norm None 1"]
    assert run(Gemma2, 2, rewrites=(AddRewrite(0, False, True),)) == ["onto inner"]
    assert run(Gemma2, 2, rewrites=(AddRewrite(0, True, False),)) == ["add norm None 1"]
    assert run(Gemma2, 2, rewrites=(AddRewrite(1, False, True),)) == ["onto inner"]


class SumIsChanged(Recorder):
    def forward(self, a, b):
        a = a + b
        a = self.other(a) * 2
        return self.norm(a)


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
        return max(self.norm(a), 2)


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


@pytest.mark.parametrize(
    ("layer", "arguments"),
    [
        (SumIsChanged, (2, 3)),
        (SumIsReplaced, (2, 3)),
        (SumIsUsedBetween, (2, 3)),
        (InPlace, (2, 3)),
        (Subtracts, (2, 3)),
        (NormOfAnother, (2, 3)),
        (TakesMore, (2, 3)),
        (Unpacks, (2, 3)),
        (InnerFunction, (2, 3)),
        (ReturnsTuple, (2, 3)),
        (ReturnsMore, (2, 3)),
        (ReturnsExpression, (2, 3)),
        (InnerIsReadAgain, (2, 3)),
        (InnerIsChanged, (2, 3)),
        (InnerOnBothSides, (2,)),
        (InnerBeforeOneThatReadsIt, (2, 3)),
    ],
)
def test_what_only_resembles_the_pattern_is_left_alone(layer, arguments) -> None:
    assert patterns_of(layer).adds == ()
    assert run(layer, *arguments) == []


def test_families_go_by_dataflow_not_by_name() -> None:
    assert list(patterns_of(LlamaDecoderLayer).adds) == [
        Add("post_attention_layernorm", None),
        Add(None, "mlp"),
    ]
    assert list(patterns_of(GraniteDecoderLayer).adds) == [Add("post_attention_layernorm", None)]
    assert list(patterns_of(Gemma2DecoderLayer).adds) == [
        Add("pre_feedforward_layernorm", "post_attention_layernorm"),
        Add(None, "post_feedforward_layernorm"),
    ]
    assert list(patterns_of(Olmo2DecoderLayer).adds) == [
        Add("mlp", "post_attention_layernorm"),
        Add(None, "post_feedforward_layernorm"),
    ]
