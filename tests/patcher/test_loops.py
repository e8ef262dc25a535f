"""A stream goes straight from layer to layer only where the loop does nothing else with it."""

# ruff: noqa: RET504

from __future__ import annotations

import pytest
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextModel
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from fused_norm.patcher.loops import Loop, loops_of

from .models import TRANSFORMERS_4


class Plain:
    def forward(self, h, mask):
        for layer in self.layers:
            h = layer(h, mask=mask)
        return self.norm(h)


class Counted:
    def forward(self, h, n):
        for index, layer in enumerate(self.layers[:n]):
            kind = self.kinds[index]
            h = layer(h, self.masks[kind])
        h = self.norm(h)
        return h


class Keyword:
    def forward(self, h):
        for layer in self.blocks:
            h = layer(mask=None, hidden_states=h)
        return h


class Two:
    def forward(self, h):
        for layer in self.first:
            h = layer(h)
        h = self.middle(h)
        for layer in self.second:
            h = layer(h)
        return self.norm(h * 2)


class Conditional:
    def forward(self, h):
        if self.flag:
            for layer in self.layers:
                h = layer(h)
            h = self.norm(h)
        return h


@pytest.mark.parametrize(
    ("stack", "loops"),
    [
        (Plain, [Loop("layers", "norm")]),
        (Counted, [Loop("layers", "norm")]),
        (Keyword, [Loop("blocks", None)]),
        (Two, [Loop("first", "middle"), Loop("second", None)]),
        (Conditional, [Loop("layers", "norm")]),
    ],
)
def test_clean_loops_are_found_with_the_norm_after_them(stack, loops) -> None:
    assert list(loops_of(stack)) == loops


class Deepstack:
    def forward(self, h, extra):
        for index, layer in enumerate(self.layers):
            h = layer(h)
            if index in extra:
                h = self.process(h, extra[index])
        return self.norm(h)


class Unpacks:
    def forward(self, h):
        for layer in self.layers:
            h = layer(h)[0]
        return self.norm(h)


class UnpacksTuple:
    def forward(self, h):
        for layer in self.layers:
            h, _ = layer(h)
        return self.norm(h)


class Reversed:
    def forward(self, h):
        for layer in reversed(self.layers):
            h = layer(h)
        return self.norm(h)


class Strided:
    def forward(self, h):
        for layer in self.layers[::2]:
            h = layer(h)
        return self.norm(h)


class LastOnes:
    def forward(self, h):
        for layer in self.layers[2:]:
            h = layer(h)
        return self.norm(h)


class Collects:
    def forward(self, h):
        everything = ()
        for layer in self.layers:
            everything += (h,)
            h = layer(h)
        return self.norm(h), everything


class TwoCalls:
    def forward(self, h):
        for layer in self.layers:
            h = layer(h)
            h = layer(h)
        return self.norm(h)


class TakesItTwice:
    def forward(self, h):
        for layer in self.layers:
            h = layer(h, skip=h)
        return self.norm(h)


class AnotherName:
    def forward(self, h):
        for layer in self.layers:
            g = layer(h)
        return self.norm(g)


class AnotherModule:
    def forward(self, h):
        for _layer in self.layers:
            h = self.shared(h)
        return self.norm(h)


class Else:
    def forward(self, h):
        for layer in self.layers:
            h = layer(h)
        else:
            h = h * 2
        return self.norm(h)


class UnderIf:
    def forward(self, h):
        for layer in self.layers:
            if self.flag:
                h = layer(h)
        return self.norm(h)


@pytest.mark.parametrize(
    "stack",
    [
        Deepstack,
        Unpacks,
        UnpacksTuple,
        Reversed,
        Strided,
        LastOnes,
        Collects,
        TwoCalls,
        TakesItTwice,
        AnotherName,
        AnotherModule,
        Else,
        UnderIf,
    ],
)
def test_loops_that_do_more_are_not(stack) -> None:
    assert loops_of(stack) == ()


def test_stacks_of_transformers() -> None:
    assert loops_of(LlamaModel) == loops_of(Qwen3Model) == (Loop("layers", "norm"),)
    assert loops_of(Qwen3VLTextModel) == ()
    assert all(loop.norm is None for loop in loops_of(Gemma3nTextModel)) or not TRANSFORMERS_4
