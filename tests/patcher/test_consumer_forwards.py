"""The consumers of a norm follow from the forwards of layer and block; only plain ones get a separate output."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fused_norm
from fused_norm.patcher.patterns import patterns_of
from fused_norm.patcher.patterns.calls import callee_name
from fused_norm.patcher.patterns.consumers import find_inputs

from .forwards import layer_of
from .random_forwards import GLOBALS, TOKENS, WIDTH, Block, Model, layer_with

PLAIN = "return self.q(x) + self.k(x)"

LAYERS_WITHOUT_A_CONSUMER = {
    "behind *args": "rest = (a,)\nc = self.norm(b)\nd = self.attention(*rest, c)",
    "as *args": "c = self.norm(b)\nd = self.attention(*c)",
    "in a loop": "c = self.norm(b)\nfor _ in range(2):\n    d = self.attention(c)",
    "in a comprehension": "c = self.norm(b)\nd = [self.attention(c) for _ in range(2)]",
    "in a function inside": "c = self.norm(b)\nd = (lambda: self.attention(c))()",
    "twice": "c = self.norm(b)\nd = self.attention(c) + self.mlp(c)",
    "of a name with two values": "c = a\nif self.flag:\n    c = self.norm(b)\nd = self.attention(c)",
    "written into": "c = self.norm(b)\nc += a\nd = self.attention(c)",
    "not of the module": "c = self.norm(b)\nd = torch.tanh(c)",
}


@pytest.mark.parametrize("name", LAYERS_WITHOUT_A_CONSUMER)
def test_a_norm_has_no_consumer_that_is_not_plain(name: str) -> None:
    layer = layer_with(f"{LAYERS_WITHOUT_A_CONSUMER[name]}\nreturn a, b, d", PLAIN, PLAIN)
    assert [norm for norm in patterns_of(layer).consumed_norms if norm.consumer is not None] == []


def test_a_plain_consumer_is_found() -> None:
    layer = layer_with("c = self.norm(b)\nd = self.attention(c)\nreturn a, b, d", PLAIN, PLAIN)
    (consumed,) = [norm for norm in patterns_of(layer).consumed_norms if norm.consumer is not None]
    assert (consumed.consumer.module.attr, consumed.consumer.argument) == ("attention", 0)


BLOCKS: dict[str, tuple[str, tuple[str, ...], str | None]] = {
    "by linears": ("if x.shape[0] > 1:\n    return self.q(x) + self.k(x)\nreturn self.k(x)", ("q", "k", "k"), None),
    "in a loop": ("for _ in range(2):\n    q = self.q(x)\nreturn q", (), "self.q(x)"),
    "in a comprehension": ("return sum(self.q(x) for _ in range(2))", (), "self.q(x)"),
    "in a function inside": (
        "def read():\n    return self.q(x)\nreturn read() + self.k(x)",
        ("k",),
        "a function inside",
    ),
    "in a lambda": ("return (lambda: self.q(x))() + self.k(x)", ("q", "k"), "a function inside"),
    "of a name with two values": ("if self.flag:\n    x = x * 2\nreturn self.q(x)", (), "x * 2"),
    "of a name that another argument may have": ("if y is not None:\n    x = y\nreturn self.q(x)", (), "self.q(x)"),
    "as *args": ("return self.q(*(x,))", (), "(x,)"),
    "written into": ("q = self.q(x)\nx += 1\nreturn q", ("q",), "x += 1"),
    "no linear": ("return self.q(x) + x", ("q",), "self.q(x) + x"),
    "a view": ("return self.q(x) + self.k(x.view(-1, 8))", ("q",), "x.view"),
    "a copy": ("z = x\nreturn self.q(z)", (), "z = x"),
}
"""A forward, the linears that read its first argument, and the source of its first other use."""


@pytest.mark.parametrize("name", BLOCKS)
def test_who_reads_an_argument_is_told(name: str) -> None:
    block, consumers, other_use = BLOCKS[name]
    first = find_inputs(layer_of(block, "x, y=None", Block, names=GLOBALS))[0]
    assert (tuple(map(callee_name, first.calls)), first.other) == (consumers, other_use)


class BehindADecorator(Block):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) + self.k(x)


def test_a_decorator_may_read_an_argument_otherwise() -> None:
    first = find_inputs(BehindADecorator)[0]
    assert (tuple(map(callee_name, first.calls)), first.other) == (
        ("q", "k"),
        "a decorator from torch.utils._contextlib",
    )


@pytest.mark.parametrize("edit", ["b += 1", "b.mul_(2)", "b[..., 0] = 1", "c.add_(1)"])
def test_a_residual_that_is_edited_behind_its_norm_is_not_handed_on(edit: str) -> None:
    layer = layer_with(f"c = self.norm(b)\nc = self.attention(c)\n{edit}\nd = b + c\nreturn a, b, d", PLAIN, PLAIN)
    assert [norm.later for norm in patterns_of(layer).consumed_norms] == [()]


def with_pre_hook(block: Any) -> None:
    block.q.register_full_backward_pre_hook(lambda module, gradients: None)


def with_forward(block: Any) -> None:
    theirs = type(block).forward
    type(block).forward = lambda self, *args, **named: theirs(self, *args, **named)


@pytest.mark.parametrize("change", [with_pre_hook, with_forward, None])
def test_a_linear_that_others_see_is_asked_for_at_each_call(change: Any, device: str) -> None:
    model = Model(layer_with("c = self.norm(b)\nd = self.attention(c)\nreturn a, b, d", PLAIN, PLAIN)()).to(device)
    fused_norm.apply_fused_norm(model)
    block: Any = model.layers[0].attention
    if change is not None:
        change(block)
    dtypes: list[Any] = []
    read = type(model.layers[0]).fused_norm_passthrough

    def noted(self: Any, norm: Any, x: Any, consumer: Any = None) -> Any:
        result = read(self, norm, x, consumer)
        dtypes.append(getattr(result[0], "consumers", result[0]).dtype)
        return result

    type(model.layers[0]).fused_norm_passthrough = noted
    inputs = [torch.randn(1, TOKENS, WIDTH, device=device) for _ in range(4)]
    with torch.autocast(device, torch.bfloat16):
        model(*inputs)
        with fused_norm.disabled():
            model(*inputs)
    assert dtypes == [torch.bfloat16 if change is None else torch.float32, torch.float32]
