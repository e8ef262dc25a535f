"""Linears that consume a norm: each reads what it would read of a stock norm, however its layer and block are written.

Under autocast a norm in float32 is written in 16 bits, with an output for each linear that reads it, if nothing else
reads it. Any other consumer sees the stock norm.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import fused_norm

from .forwards import layer_of
from .models import equal_in_fp32, fused_copy, relative

BF16, FP32 = torch.bfloat16, torch.float32
WIDTH = 12
MOST_CONSUMERS = 6
"""How many outputs a norm has at most."""


class Block(nn.Module):
    """A module of three linears that read its input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.flag, self.factor = True, 2.0
        self.dropout = nn.Dropout(0.5)


class Layer(nn.Module):
    """A layer with a norm before a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.norm, self.other = LlamaRMSNorm(WIDTH), LlamaRMSNorm(WIDTH)
        self.block, self.flag = block, True
        self.proj = nn.Linear(WIDTH, WIDTH)


LAYER = "residual = x; h = self.norm(x); h = self.block(h); return residual + h"
BLOCK = "return self.q(x) + self.k(x) * self.v(x)"


def build_model(
    layer: str = LAYER, block: str = BLOCK, arguments: str = "x", *, dtype: torch.dtype = FP32
) -> nn.Module:
    """Return a model of a single layer with these forwards; ``arguments``: those of the block's forward."""
    torch.manual_seed(0)
    inner = layer_of(block, arguments, base=Block)()
    model = nn.Module()
    model.layers = nn.ModuleList([layer_of(layer, "x", base=Layer)(inner)])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.to(dtype)


def reason_of(model: nn.Module) -> str | None:
    """Return the report's reason why the block's linears share an input: "" without a row, None without a reason."""
    rows = fused_norm.apply_fused_norm(copy.deepcopy(model), strict=False).consumers
    return next((row.reason for row in rows or () if row.path == "layers.0.block"), "")


def step(model: nn.Module, device: str, *, autocast: torch.dtype | None = BF16, frozen: bool = False) -> list[Tensor]:
    """Return a layer's output, and gradients of x and of all parameters."""
    model.to(device)
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    x = x.to(model.layers[0].proj.weight.dtype).requires_grad_(not frozen)
    torch.manual_seed(2)
    with torch.autocast(device, autocast or BF16, enabled=autocast is not None):
        y = model.layers[0](x * 1)  # of a leaf autocast keeps the cast for all who read it
    leaves = [*([] if frozen else [x]), *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    grads = torch.autograd.grad(y.float().sin().sum(), leaves, allow_unused=True)
    return [y, *(torch.zeros(()) if grad is None else grad for grad in grads)]


def assert_near(actual: list[Tensor], expected: list[Tensor], bound: float = 2e-2) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert relative(a, b) < bound or not b.count_nonzero()


def nodes(y: Tensor) -> Iterator[Any]:
    """Yield the nodes of a tensor's graph."""
    seen, waiting = set(), [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def own_inputs(y: Tensor, dtype: torch.dtype = BF16) -> int:
    """Return how many linears and adapters read an output of a norm that was written for them in ``dtype``."""
    count = 0
    for node in nodes(y):
        if "ForConsumers" in node.name():
            count += sum(metadata.dtype == dtype for metadata in node._input_metadata[:-1])
    return count


def assert_same_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Assert equal bits; on a GPU kernels that differ may add up in another order."""
    assert [tensor.dtype for tensor in actual] == [tensor.dtype for tensor in expected]
    assert [equal_in_fp32(*pair) for pair in zip(actual, expected, strict=True)] == [True] * len(actual)


def compare(
    model: nn.Module,
    expected: int,
    device: str,
    change: Callable[[nn.Module], Any] | None = None,
    *,
    autocast: torch.dtype = BF16,
    dtype: torch.dtype = BF16,
) -> None:
    """Assert stock's numbers, the bits of linears that share an input, and how many linears have separate inputs.

    ``change``: is called with each model after a first step. ``dtype``: that of the inputs that are counted.
    """
    steps = []
    for variant in (fused_copy(model, strict=False), fused_copy(model, strict=False, consumers=False), model):
        if change is not None:
            step(variant, device, autocast=autocast)
            change(variant)
        steps.append(step(variant, device, autocast=autocast))
    assert own_inputs(steps[0][0], dtype) == expected
    assert_near(steps[0], steps[2])
    assert_same_bits(steps[0], steps[1])


# ---- Forwards of blocks ----

NO_LINEAR = "dropout is no plain linear but a Dropout, or other code sees its input"
BLOCKS: dict[str, tuple[str, int | str]] = {
    "linears alone": (BLOCK, 3),
    "behind a docstring": (f'"""What it does."""\n{BLOCK}', 3),
    "one linear twice": ("return self.q(x) * 2 + self.q(x)", 2),
    "in another order": ("v = self.v(x); k = self.k(x); return self.q(x) - k * v", 3),
    "in one branch of two": ("if self.flag:\n    return self.q(x)\nreturn self.k(x) + self.v(x)", 3),
    "its shape": ("return self.q(x).view(x.shape) + self.k(x).view(x.size()) * x.dim() * x.ndim", 2),
    "its device": ("return self.q(x).to(x.device)", 1),
    "its dtype": ("return self.q(x) + self.k(x).to(x.dtype)", "x.dtype"),
    "a view of it": ("return self.q(x) + self.k(x[:, :]) + self.v(x)", "x[:, :]"),
    "a view by a method": ("return self.q(x) + self.k(x.view(2, 3, -1))", "x.view"),
    "itself": ("return self.q(x) + self.k(x) + x", "self.q(x) + self.k(x) + x"),
    "itself, detached": ("return self.q(x) + x.detach()", "x.detach"),
    "a copy": ("z = x; return self.q(z)", "z = x"),
    "a linear by a name": ("return self.q(x) + self.k(input=x)", "input=x"),
    "a linear by a tuple": ("return self.q(*(x,))", "(x,)"),
    "a module that is none": ("return self.q(x) + self.dropout(x)", ""),
    "in a loop": ("y = self.q(x)\nfor _ in range(2):\n    y = y + self.k(x)\nreturn y", "self.k(x)"),
    "in a list": ("return self.q(x) + [self.k(x) * n for n in (2, 3)][1]", "self.k(x)"),
    "in a set": ("return self.q(x) + next(iter({self.k(x) for _ in (2,)}))", "self.k(x)"),
    "in a dict": ("return self.q(x) + {n: self.k(x) for n in (2, 3)}[3]", "self.k(x)"),
    "in a generator": ("return self.q(x) + sum(self.k(x) for _ in (2, 3))", "self.k(x)"),
    "in a while loop": ("y = self.q(x); n = 0\nwhile n < 2:\n    y = y + self.k(x)\n    n += 1\nreturn y", "self.k(x)"),
    "in a lambda": ("read = lambda: self.k(x)\nreturn self.q(x) + read() + read()", "a function inside"),
    "in a function inside": ("def read():\n    return self.q(x)\nreturn read() + self.k(x)", "a function inside"),
    "behind another value": ("y = self.q(x); x = x * 2; return y + self.k(x)", "x * 2"),
    "behind what may be another value": ("y = self.q(x)\nif self.flag:\n    x = y\nreturn y + self.k(x)", "self.k(x)"),
    "behind what never is another value": ("if not self.flag:\n    x = self.q(x)\nreturn self.k(x)", "self.k(x)"),
    "behind another argument": ("if y is not None:\n    x = y\nreturn self.q(x)", "self.q(x)"),
    "behind a write": ("y = self.q(x); x += 1; return y", "x += 1"),
}
"""A forward of x and y=None, and how many of its linears have separate inputs, or the first other use of x."""


@pytest.mark.parametrize("name", BLOCKS)
def test_only_linears_that_alone_read_an_argument_have_inputs_of_their_own(name: str, device: str) -> None:
    block, expected = BLOCKS[name]
    model = build_model(block=block, arguments="x, y=None")
    compare(model, expected if isinstance(expected, int) else 0, device)
    reason = f"its forward reads x in {expected}" if expected else NO_LINEAR
    assert reason_of(model) == (None if isinstance(expected, int) else reason)


class Decorated(Block):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x)


def test_the_report_has_the_reason_why_linears_share_one_input() -> None:
    model = build_model()
    model.layers[0].block = Decorated()
    assert reason_of(model) == "its forward reads x in a decorator from torch.utils._contextlib"
    assert reason_of(build_model(block="return self.q(y)", arguments="x, y=1.0")) == "", "it does not read x at all"
    model = build_model()
    model.layers[0].block.gradient_checkpointing = False
    assert reason_of(model) == "it may be checkpointed on its own"


@pytest.mark.parametrize(
    ("hooked", "reason"), [("block", "other code sees its calls"), ("block.q", "other code sees the input of its q")]
)
def test_the_report_says_that_a_hook_keeps_linears_on_one_input(hooked: str, reason: str, device: str) -> None:
    model = build_model()
    handle = model.layers[0].get_submodule(hooked).register_forward_hook(lambda *_: None)
    assert reason_of(model) == reason
    handle.remove()
    compare(model, 3, device)


@pytest.mark.parametrize(("count", "expected"), [(MOST_CONSUMERS, MOST_CONSUMERS), (MOST_CONSUMERS + 1, 0)])
def test_a_norm_has_a_limited_number_of_outputs(count: int, expected: int, device: str) -> None:
    model = build_model(block=f"return {' - '.join(['self.q(x)'] * count)}")
    compare(model, expected, device)
    assert reason_of(model) == (None if expected else f"its linears read {count} tensors, more than {MOST_CONSUMERS}")


# ---- Forwards of layers: consumers of the norm ----

LAYERS: dict[str, tuple[str, str, int]] = {
    "by a name": (LAYER.replace("(h)", "(x=h)"), "x", 3),
    "by the name of another argument": (LAYER.replace("(h)", "(x, other=h)"), "x, other", 0),
    "at another place": (LAYER.replace("(h)", "(1, h)"), "y, x", 3),
    "behind the arguments of a tuple": (
        "pair = (x, x); h = self.norm(x); return self.block(*pair, h)", "y, x, z=0.5", 0
    ),
    "in the arguments of a tuple": ("h = self.norm(x); return x + self.block(*(h,))", "x", 0),
    "in the arguments of a dict": ("h = self.norm(x); return x + self.block(**{'x': h})", "x", 0),
    "as a keyword alone": (LAYER.replace("(h)", "(x=h)"), "*, x", 0),
    "as one of many": (LAYER, "*all, x=2", 0),
    "twice in one call": (LAYER.replace("(h)", "(h, h)"), "x, y", 0),
    "by two modules": (LAYER.replace("self.block(h)", "self.block(h) + self.proj(h)"), "x", 0),
    "by an add too": (LAYER.replace("self.block(h)", "self.block(h) + h"), "x", 0),
    "by a view": (LAYER.replace("self.block(h)", "self.block(h[:, :])"), "x", 0),
    "in a loop": ("h = self.norm(x)\nfor _ in range(2):\n    x = x + self.block(h)\nreturn x", "x", 0),
    "in a list": ("h = self.norm(x); return x + sum([self.block(h) * n for n in (2, 3)])", "x", 0),
    "in a function inside": ("h = self.norm(x); f = lambda: self.block(h); return x + f() + f()", "x", 0),
    "in a function inside too": ("h = self.norm(x); f = lambda: h; return x + self.block(h) + f()", "x", 0),
    "by two names": ("h = g = self.norm(x); return x + self.block(h) + g", "x", 0),
    "by an attribute": ("self.h = self.norm(x); y = x + self.block(self.h); del self.h; return y", "x", 0),
    "unpacked": ("(a, *b) = self.norm(x); return x + self.block(a)", "x", 0),
    "by a function": ("h = self.norm(x); block = self.block; return x + block(h)", "x", 0),
    "by a function of no module": ("h = self.norm(x); return x + abs(h)", "x", 0),
    "behind a write": ("h = self.norm(x); h += x; return x + self.block(h)", "x", 0),
    "of a name with two values": ("h = x\nif self.flag:\n    h = self.norm(x)\nreturn x + self.block(h)", "x", 0),
    "in both branches": (
        "h = self.norm(x)\nif self.flag:\n    return x + self.block(h)\nreturn x - self.block(h)", "x", 0
    ),
    "behind an add": ("y = self.proj(x); x = x + y; h = self.norm(x); return x + self.block(h)", "x", 3),
    "behind an add, by a view": ("y = self.proj(x); x = x + y; h = self.norm(x); return x + self.block(h[:])", "x", 0),
    "by a linear": ("h = self.norm(x); return x + self.proj(h)", "x", 0),
    "in a loop of its own": ("for _ in range(2):\n    h = self.norm(x)\n    x = x + self.block(h)\nreturn x", "x", 0),
}  # fmt: skip
"""A layer's forward, the arguments of its block's forward, and how many linears of the block have separate inputs."""


@pytest.mark.parametrize("name", LAYERS)
def test_a_norm_that_one_block_reads_is_found_whoever_it_is_handed_to(name: str, device: str) -> None:
    layer, arguments, expected = LAYERS[name]
    block = {"y, x, z=0.5": "return self.q(x) + self.k(z) + z", "*all, x=2": "return self.q(all[0]) * x"}
    compare(build_model(layer, block.get(arguments, BLOCK), arguments), expected, device)


# ---- Forwards of layers: consumers of the norm's input ----


def is_handed_on(y: Tensor) -> bool:
    """Return whether something reads the norm's pass-through of its input, whose gradient joins the norm's backward."""
    edges = (edge for node in nodes(y) for edge in node.next_functions if edge[0] is not None)
    return any(
        node.name() == "RMSNormForConsumersBackward" and number == len(node._input_metadata) - 1
        for node, number in edges
    )


AFTER = "h = self.norm(x); h = self.block(h)"
RESIDUALS: dict[str, tuple[str, bool]] = {
    "itself": (f"{AFTER}; return x + h", True),
    "another name": (f"residual = x; {AFTER}; return residual + h", True),
    "two names": (f"residual = x; other = x; {AFTER}; return residual + other * h", True),
    "another name and itself": (f"residual = x; {AFTER}; return residual + x * h", True),
    "a name that is given later": (f"{AFTER}; residual = x; return residual + h", True),
    "the norm's own name": ("residual = x; x = self.norm(x); x = self.block(x); return residual + x", True),
    "a name in one branch": (f"residual = x; {AFTER}\nif self.flag:\n    return residual + h\nreturn x - h", True),
    "of another norm": ("y = self.other(x); h = self.norm(x); h = self.block(h); return x + h * y", True),
    "of a norm that nothing reads else": ("residual = x; y = self.other(x); z = y[:]; return residual + z", True),
    "of a norm in an if": ("residual = x; h = x\nif self.flag:\n    h = self.norm(x)\nreturn residual + h", False),
    "a name of a name": (f"residual = x; other = residual; {AFTER}; return other + h", False),
    "a name that may be something else": (
        f"residual = x\nif self.flag:\n    residual = x * 2\n{AFTER}; return residual + h", False
    ),
    "a name that may be it": (
        f"residual = x * 2\nif self.flag:\n    residual = x\n{AFTER}; return residual + h", False
    ),
    "a name that is something else later": (f"residual = x; {AFTER}; residual = h * 2; return residual + h", False),
    "a name that was something else": (
        f"residual = x; y = residual; residual = x * 2; {AFTER}; return residual + y * h", False
    ),
    "a name in a tuple": (f"residual, two = x, 2; {AFTER}; return residual + two * h", False),
    "a name for two": (f"residual = other = x; {AFTER}; return residual + other * h", False),
    "a part of it": (f"residual = x[:, :1]; {AFTER}; return residual + h", False),
    "a name that a function has": (f"residual = x; f = lambda: residual; {AFTER}; residual = h; return f() + h", False),
    "a name that is read before too": (f"residual = x; y = residual * 2; {AFTER}; return residual + y * h", False),
    "an expression": ("h = self.norm(x * 2); h = self.block(h); return x + h", False),
    "nothing": (f"{AFTER}; return h", False),
    "in a loop": ("for _ in range(2):\n    h = self.norm(x)\n    h = self.block(h)\nreturn x + h", False),
}  # fmt: skip
"""A forward that reads the norm's input after the norm too, and whether it reads the norm's pass-through."""


@pytest.mark.parametrize(
    ("name", "autocast"),
    [*((name, None) for name in RESIDUALS), *((name, BF16) for name in ("itself", "two names", "nothing"))],
)
def test_what_the_norm_has_read_is_read_later_with_stocks_numbers(
    name: str, autocast: torch.dtype | None, device: str
) -> None:
    layer, is_later = RESIDUALS[name]
    model = build_model(layer)
    actual, expected = (
        step(variant, device, autocast=autocast) for variant in (fused_copy(model, strict=False), model)
    )
    assert_near(actual, expected, 2e-2 if autocast else 1e-5)
    assert is_handed_on(actual[0]) == is_later


WRITES: dict[str, str] = {
    "added to": "residual += 1",
    "by a method": "residual.mul_(2)",
    "in part": "residual[:, 0] = 0",
    "by an argument": "functional.nn.scale(2, out=residual)",
}


@pytest.mark.parametrize(("write", "grad"), [*((write, True) for write in WRITES), ("by a method", False)])
def test_a_residual_that_is_written_into_behind_the_norm_is_stocks(write: str, grad: bool, device: str) -> None:
    model = build_model(f"residual = x; {AFTER}; {WRITES[write]}; return residual + h + x", dtype=BF16).to(device)
    outputs = []
    for variant in (model, fused_copy(model, strict=False)):
        x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1)).to(device, BF16).requires_grad_()
        with torch.set_grad_enabled(grad):
            y = variant.layers[0](x * 1)
        assert not is_handed_on(y)
        outputs.append([y.detach()])
    assert_near(*outputs)
