"""What reads a norm's output, or its input behind it, reads what it would of stock, however layers are written.

Under autocast a norm in float32 may be written in 16 bits where linears alone read it; all else sees the stock norm.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from .forwards import layer_of
from .models import Subclass, assert_all_near, equal_in_fp32, fused_copy, relative

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDTH = 12


class Block(nn.Module):
    """A module of three linears that read its input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.flag = True
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


def build_model(layer: str = LAYER, block: str = BLOCK, arguments: str = "x", dtype: torch.dtype = FP32) -> Any:
    """Return a model of a single layer with these forwards; ``arguments``: those of the block's forward."""
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList([layer_of(layer, "x", base=Layer)(layer_of(block, arguments, base=Block)())])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.to(dtype)


def adapted(*names: str) -> Any:
    """Return a model whose block has LoRA adapters on the linears of these names."""
    model = build_model()
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=list(names), init_lora_weights=False), model)
    return model


def block_of(model: Any) -> Any:
    return model.layers[0].block


def step(model: Any, device: str, autocast: torch.dtype | None = BF16) -> list[Tensor]:
    """Return a layer's output, and gradients of x and of all parameters."""
    model.to(device)
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    x = x.to(model.layers[0].proj.weight.dtype).requires_grad_()
    torch.manual_seed(2)
    with torch.autocast(device, autocast or BF16, enabled=autocast is not None):
        y = model.layers[0](x * 1)  # of a leaf autocast keeps the cast for all who read it
    leaves = [x, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    grads = torch.autograd.grad(y.float().sin().sum(), leaves, allow_unused=True)
    return [y, *(torch.zeros(()) if grad is None else grad for grad in grads)]


def assert_near(actual: list[Tensor], expected: list[Tensor], bound: float = 2e-2) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert relative(a, b) < bound or not b.count_nonzero()


def compare(
    model: Any, device: str, change: Callable[[Any], Any] | None = None, autocast: torch.dtype | None = BF16
) -> None:
    """Assert stock's numbers, and the bits of a model whose norms write one output; ``change``: after a first step."""
    steps = []
    for variant in (fused_copy(model, strict=False), fused_copy(model, strict=False, shared_inputs=False), model):
        if change is not None:
            step(variant, device, autocast)
            change(variant)
        steps.append(step(variant, device, autocast))
    assert_near(steps[0], steps[2], 2e-2 if autocast else 1e-5)
    assert [tensor.dtype for tensor in steps[0]] == [tensor.dtype for tensor in steps[1]]
    assert all(equal_in_fp32(*pair) for pair in zip(*steps[:2], strict=True))


# ---- What reads a norm's output, and its input ----

BLOCKS = {
    "one linear twice": "return self.q(x) * 2 + self.q(x)",
    "in one branch of two": "if self.flag:\n    return self.q(x)\nreturn self.k(x) + self.v(x)",
    "its dtype": "return self.q(x) + self.k(x).to(x.dtype)",
    "a view of it": "return self.q(x) + self.k(x[:, :]) + self.v(x)",
    "itself": "return self.q(x) + self.k(x) + x",
    "itself, detached": "return self.q(x) + x.detach()",
    "a linear by a tuple": "return self.q(*(x,))",
    "a module that is none": "return self.q(x) + self.dropout(x)",
    "in a loop": "y = self.q(x)\nfor _ in range(2):\n    y = y + self.k(x)\nreturn y",
    "in a lambda": "read = lambda: self.k(x)\nreturn self.q(x) + read() + read()",
    "behind what may be another value": "y = self.q(x)\nif self.flag:\n    x = y\nreturn y + self.k(x)",
    "behind a write": "y = self.q(x); x += 1; return y",
}
AFTER = "h = self.norm(x); h = self.block(h)"
LAYERS = {
    "at another place": (LAYER.replace("(h)", "(1, h)"), "y, x"),
    "in the arguments of a dict": ("h = self.norm(x); return x + self.block(**{'x': h})", "x"),
    "twice in one call": (LAYER.replace("(h)", "(h, h)"), "x, y"),
    "by two modules": (LAYER.replace("self.block(h)", "self.block(h) + self.proj(h)"), "x"),
    "by an add too": (LAYER.replace("self.block(h)", "self.block(h) + h"), "x"),
    "in a loop": ("h = self.norm(x)\nfor _ in range(2):\n    x = x + self.block(h)\nreturn x", "x"),
    "by two names": ("h = g = self.norm(x); return x + self.block(h) + g", "x"),
    "of a name with two values": ("h = x\nif self.flag:\n    h = self.norm(x)\nreturn x + self.block(h)", "x"),
    "behind an add": ("y = self.proj(x); x = x + y; h = self.norm(x); return x + self.block(h)", "x"),
    "residual of two names": (f"residual = x; other = x; {AFTER}; return residual + other * h", "x"),
    "residual of another norm": ("y = self.other(x); h = self.norm(x); h = self.block(h); return x + h * y", "x"),
    "residual that may be another": (f"r = x\nif self.flag:\n    r = x * 2\n{AFTER}; return r + h", "x"),
    "residual that is another later": (f"residual = x; {AFTER}; residual = h * 2; return residual + h", "x"),
    "residual that a function has": (f"residual = x; f = lambda: residual; {AFTER}; residual = h; return f() + h", "x"),
    "no residual": (f"{AFTER}; return h", "x"),
}  # fmt: skip
"""Forwards of layers by what reads the norm's output, or its input behind the norm, and the block's arguments."""


@pytest.mark.parametrize("name", [*BLOCKS, *(f"layer: {name}" for name in LAYERS)])
def test_whatever_reads_the_norm_or_its_input_reads_stocks(name: str, device: str) -> None:
    if name in BLOCKS:
        model = build_model(block=BLOCKS[name], arguments="x, y=None")
    else:
        layer, arguments = LAYERS[name.removeprefix("layer: ")]
        model = build_model(layer, arguments=arguments)
    compare(model, device)
    if "write" not in name:  # without a cast autograd refuses it
        compare(model, device, autocast=None)


def test_what_is_read_behind_a_norm_hands_its_gradient_to_the_norms_backward(device: str) -> None:
    model = build_model("residual = x; y = self.other(x); z = y[:]; return residual + z").to(device)
    y = fused_copy(model, strict=False).layers[0](torch.randn(2, 3, WIDTH, device=device, requires_grad=True) * 1)
    (residual, _), _ = y.grad_fn.next_functions
    assert residual.name() == "RMSNormForConsumersBackward"


@pytest.mark.parametrize("write", ["residual += 1", "residual.mul_(2)", "residual[:, 0] = 0"])
def test_a_residual_that_is_written_into_behind_the_norm_is_stocks(write: str, device: str) -> None:
    model = build_model(f"residual = x; {AFTER}; {write}; return residual + h + x", dtype=BF16).to(device)
    x = torch.randn(2, 3, WIDTH, device=device, dtype=BF16).requires_grad_()
    assert_near(*([variant.layers[0](x * 1)] for variant in (fused_copy(model, strict=False), model)))


# ---- Autocast ----

CONTEXTS: dict[str, dict[str, Any]] = {"off": {"enabled": False}, "float16": {"dtype": FP16}}
BY_FUNCTIONS = """before = torch.get_autocast_dtype(x.device.type)
torch.set_autocast_dtype(x.device.type, torch.float16)
y = self.q(x) + self.k(x)
torch.set_autocast_dtype(x.device.type, before)
return y"""
INSIDE = "with self.context():\n    "
PLACES = {
    "in the block": (LAYER, f"{INSIDE}{BLOCK}"),
    "in the block, by functions": (LAYER, f"import torch\n{BY_FUNCTIONS}"),
    "around the block's call": (LAYER, BLOCK),
    "on the block's forward": (LAYER, BLOCK),
    "around the norm": (f"residual = x\n{INSIDE}h = self.norm(x)\nreturn residual + self.block(h)", BLOCK),
    "around the block": (f"residual = x; h = self.norm(x)\n{INSIDE}h = self.block(h)\nreturn residual + h", BLOCK),
    "entered before the block": (
        "h = self.norm(x); entered = self.context(); entered.__enter__(); h = self.block(h)\n"
        "entered.__exit__(None, None, None)\nreturn x + h", BLOCK
    ),
}  # fmt: skip
"""The forwards of a layer and its block, by the place of a context of autocast."""


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("place", PLACES)
def test_linears_read_what_the_autocast_of_their_own_call_makes_of_a_norm(
    place: str, context: str, device: str
) -> None:
    model = build_model(*PLACES[place])
    cls = type(block_of(model))
    enter = partial(torch.autocast, device, **CONTEXTS[context])
    cls.context = type(model.layers[0]).context = enter
    if place == "on the block's forward":
        cls.forward = enter()(cls.forward)
    elif place == "around the block's call":
        cls.__call__ = lambda self, x: enter()(nn.Module.__call__)(self, x)
    assert_all_near(step(fused_copy(model, strict=False), device), step(model, device), 5e-4)


@pytest.mark.parametrize(
    ("dtype", "norm", "autocast"),
    [(FP32, FP32, BF16), (FP32, BF16, FP16), (BF16, FP32, BF16), (BF16, BF16, FP16), (FP16, BF16, BF16)],
    ids=str,
)
def test_rows_and_norms_of_all_dtypes_have_stocks_numbers(
    dtype: torch.dtype, norm: torch.dtype, autocast: torch.dtype, device: str
) -> None:
    stock = build_model(dtype=dtype)
    stock.layers[0].norm.to(norm)
    compare(stock, device, autocast=autocast)


# ---- Hooks and other observers of a call ----

Seen = list[Tensor | None]


def noted(module: Any, how: str, seen: Seen) -> None:
    """Let a hook, or another forward, append the tensors that it sees of a module's calls to ``seen``."""

    def note(_: nn.Module, *tensors: Any) -> None:
        for tensor in tensors:
            seen.extend(tensor if isinstance(tensor, tuple) else [tensor])

    if how == "forward":
        forward = module.forward
        module.forward = lambda x: (note(module, x), forward(x))[1]
    else:
        getattr(module, f"register_{how}")(note)


PARTS: dict[str, Callable[[Any], Any]] = {
    "a linear": lambda model: block_of(model).k,
    "a LoRA layer": lambda model: block_of(model).q,
    "the linear in a LoRA layer": lambda model: block_of(model).q.base_layer,
    "the first factor of an adapter": lambda model: block_of(model).q.lora_A["default"],
    "the idle dropout of an adapter": lambda model: block_of(model).q.lora_dropout["default"],
    "the block": block_of,
    "the norm": lambda model: model.layers[0].norm,
}
HOOKS = ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook")


@pytest.mark.parametrize(
    ("part", "how"),
    [
        *((part, how) for part in ("a linear", "the block", "the norm") for how in (*HOOKS, "forward")),
        *((part, how) for part in PARTS if "LoRA" in part for how in (HOOKS[0], HOOKS[3], "forward")),
        *((part, "forward_hook") for part in PARTS if "adapter" in part),
    ],
)
def test_who_sees_a_call_sees_what_it_would_see_of_stock(part: str, how: str, device: str) -> None:
    stock = adapted("q")
    seen: list[Seen] = []
    steps = []
    shared = fused_copy(stock, strict=False, shared_inputs=False)
    for model in (fused_copy(stock, strict=False), shared, stock):
        seen.append([])
        noted(PARTS[part](model), how, seen[-1])
        steps.append(step(model, device))
    assert_near(steps[0], steps[2])
    assert len(seen[0]) > 0
    for mine, without, theirs in zip(*seen, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or (mine.dtype == theirs.dtype and relative(mine, theirs) < 2e-2)
        assert mine is None or equal_in_fp32(mine, without)


@pytest.mark.parametrize("register", ["register_module_forward_pre_hook", "register_module_full_backward_hook"])
def test_hooks_on_all_modules_see_what_they_would_see_of_stock(register: str, device: str) -> None:
    model = build_model()
    seen: list[torch.dtype] = []

    def note(module: nn.Module, inputs: Any, *_: Any) -> None:
        seen.extend(x.dtype for x in inputs if type(module) is nn.Linear and x is not None)

    handle = getattr(nn_module, register)(note)
    step(model, device), step(fused_copy(model, strict=False), device)
    handle.remove()
    half = len(seen) // 2
    assert seen[:half] == seen[half:] != []


@pytest.mark.parametrize("of_stock", [True, False])
def test_a_forward_that_a_blocks_class_gets_later_reads_what_it_would_of_stock(of_stock: bool, device: str) -> None:
    model = build_model()
    fused, seen = fused_copy(model, strict=False), []
    cls = type(block_of(model if of_stock else fused))
    forward = cls.forward
    cls.forward = lambda self, x: seen.append(x.dtype) or forward(self, x)
    actual = step(fused, device)
    assert seen == [FP32]
    assert_near(actual, step(model, device))


class Noting(Tensor):
    """A weight that notes the dtypes of the inputs of linears."""

    dtypes: ClassVar[list[torch.dtype]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is not nn.functional.linear:
            return result
        cls.dtypes.append(args[0].dtype)
        return result.as_subclass(Tensor)


def test_a_weight_of_another_class_sees_the_norm_of_stock(device: str) -> None:
    stock, steps = build_model(), []
    for model in (fused_copy(stock, strict=False), stock):
        linear = block_of(model.to(device)).k
        linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Noting), requires_grad=False)
        Noting.dtypes.clear()
        steps.append(step(model, device))
        assert Noting.dtypes == [FP32]
    assert_near(*steps)


def test_an_input_of_another_class_is_stocks(device: str) -> None:
    model = build_model().to(device)
    x = torch.randn(2, 3, WIDTH, device=device).as_subclass(Subclass)
    with torch.autocast(device, BF16):
        outputs = [[variant.layers[0](x.clone())] for variant in (fused_copy(model, strict=False), model)]
    assert type(outputs[0][0]) is type(outputs[1][0]) is Subclass
    assert_near(*outputs)


# ---- Linears and adapters that change between calls ----


def changing(name: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda model: change(getattr(block_of(model), name))


def replacing(module: nn.Module | None) -> Callable[[Any], Any]:
    return lambda model: setattr(block_of(model), "v", copy.deepcopy(module))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: None,
    "dropout that may drop": changing("q", lambda layer: layer.lora_dropout.update({"default": nn.Dropout(0.5)})),
    "a first factor in 16 bits": changing("q", lambda layer: layer.lora_A.to(BF16)),
    "a first factor in the other 16 bits": changing("q", lambda layer: layer.lora_A.to(FP16)),
    "a second factor in 16 bits": changing("q", lambda layer: layer.lora_B.to(BF16)),
    "its input uncast": changing("q", lambda layer: setattr(layer, "cast_input_dtype_enabled", False)),
    "switched off": changing("q", lambda layer: layer.enable_adapters(False)),
    "merged": changing("q", lambda layer: layer.merge()),
    "a frozen norm": lambda model: model.layers[0].norm.requires_grad_(False),
    "another module for a linear": replacing(nn.Identity()),
    "another class of linear": replacing(type("Other", (nn.Linear,), {})(WIDTH, WIDTH)),
    "a LoRA layer for a linear": lambda model: replacing(block_of(model).q)(model),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_linears_and_adapters_read_is_asked_at_each_call(name: str, device: str) -> None:
    compare(adapted("q"), device, CHANGES[name])


def test_the_gradients_of_many_linears_and_adapters_are_not_swapped(device: str) -> None:
    compare(adapted("q", "k", "v"), device)
