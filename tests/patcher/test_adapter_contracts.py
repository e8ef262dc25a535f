"""A fused LoRA layer is PEFT's layer at every call: its scale, factors, adapters and hooks are those of that call."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import pytest
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from torch import Tensor, nn

import fused_norm
from fused_norm.patcher import fused_norm_module

from .models import Subclass, assert_same, relative
from .ranks import called_operators

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RANK, WIDTH, COLUMNS = 4, 64, 80
ABOUT_PEFT = "PEFT's LoRA code"
LINEARS: dict[str, Callable[[], nn.Module]] = {
    "16 bits": lambda: nn.Linear(WIDTH, COLUMNS, bias=False),
    "4 bits": lambda: Linear4bit(WIDTH, COLUMNS, bias=False, compute_dtype=BF16, quant_type="nf4"),
    "8 bits": lambda: Linear8bitLt(WIDTH, COLUMNS, bias=False, has_fp16_weights=False),
}


def with_integers(weight: Tensor) -> None:
    """Fill a weight with numbers whose sums are exact in 16 bits, so that the order of a sum changes no bit."""
    with torch.no_grad():
        weight.copy_(torch.randint(-1, 2, weight.shape))


def adapted(device: str, bits: str = "16 bits", **config: Any) -> Any:
    """Return a PEFT model of a linear with a LoRA adapter; weights are whole numbers if they are not quantised."""
    torch.manual_seed(0)
    base: Any = nn.Sequential(LINEARS[bits]())
    if bits == "16 bits":
        with_integers(base[0].weight)
    base.to(device, BF16)
    base.is_loaded_in_4bit, base.is_loaded_in_8bit = bits == "4 bits", bits == "8 bits"  # PEFT reads both
    lora = peft.LoraConfig(**{"r": RANK, "lora_alpha": 8, "target_modules": ["0"]} | config)
    model = peft.get_peft_model(base, lora).train()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            with_integers(parameter)
    return model


def layer_of(model: Any) -> Any:
    return model.base_model.model[0]


def pair(device: str, **options: Any) -> tuple[Any, Any]:
    """Return a stock model and its copy with a fused LoRA layer."""
    stock = adapted(device, **options)
    fused = copy.deepcopy(stock)
    fused_norm.apply_fused_norm(fused, strict=False)
    return stock, fused


def step(
    model: Any, device: str, between: Callable[[Any], Any] | None = None, autocast: torch.dtype | None = BF16
) -> tuple[bool, list[Tensor | None]]:
    """Return whether the layer ran fused, its output, and the gradients of x and of all trained parameters.

    ``between``: is called with the layer between its forward and its backward.
    """
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(-1, 2, (3, 5, WIDTH), generator=generator).to(device, BF16).requires_grad_()
    dy = torch.randint(-1, 2, (3, 5, COLUMNS), generator=generator).to(device)
    torch.manual_seed(1)
    with called_operators() as called, torch.autocast(device, autocast or BF16, enabled=autocast is not None):
        y = model(x)
    ran_fused = any(name.startswith("lora_") for name in called)
    if between is not None:
        between(layer_of(model))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return ran_fused, [y.detach(), *torch.autograd.grad(y, [x, *trained], dy.to(y.dtype), allow_unused=True)]


def assert_pefts_bits(
    device: str,
    change: Callable[[Any], Any] = lambda layer: None,
    between: Callable[[Any], Any] | None = None,
    is_fused: bool | None = None,
    **options: Any,
) -> None:
    """Assert PEFT's bits of a layer that is changed after the patch, both before its first call and after it.

    ``between``: is called between the forward and the backward of a step, which another step follows.
    ``is_fused``: if set, whether the changed layer runs fused. ``options``: those of the adapter.
    """
    for is_warm in (False, True):
        stock, fused = pair(device, **options)
        if is_warm:
            assert step(fused, device)[0]
        for model in (stock, fused):
            torch.manual_seed(2)
            change(layer_of(model))
        for act in (between, None):
            ran_fused, actual = step(fused, device, act)
            assert is_fused in (None, ran_fused)
            assert_same(actual, step(stock, device, act)[1])


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Return a function that returns the reasons logged about LoRA layers until now."""
    monkeypatch.setattr(fused_norm_module, "_warned", {})
    return lambda: [message.partition(": ")[2] for message in caplog.messages if ABOUT_PEFT in message]


LAYERS: dict[str, tuple[dict[str, Any], torch.dtype, torch.dtype | None, bool]] = {
    "scale of three quarters": ({"lora_alpha": 3}, FP32, BF16, True),
    "dropout": ({"lora_dropout": 0.5}, FP32, BF16, True),
    "by the root of the rank": ({"use_rslora": True}, FP32, BF16, True),
    "float16": ({}, FP32, FP16, True),
    "16-bit adapters": ({"lora_dropout": 0.5}, BF16, BF16, True),
    "16-bit adapters without autocast": ({}, BF16, None, True),
    "without autocast": ({}, FP32, None, False),
    "with a bias": ({"lora_bias": True}, FP32, BF16, False),
    "dora": ({"use_dora": True}, FP32, BF16, False),
}
"""Options of the adapter, the dtype of its factors, autocast's dtype, and whether the layer runs fused."""


@pytest.mark.parametrize("bits", LINEARS)
@pytest.mark.parametrize("case", LAYERS)
def test_layers_of_all_kinds_have_pefts_bits(case: str, bits: str, device: str) -> None:
    config, dtype, autocast, is_fused = LAYERS[case]
    stock, fused = pair(device, bits=bits, **config)
    for model in (stock, fused):
        layer_of(model).lora_A.to(dtype), layer_of(model).lora_B.to(dtype)
    ran_fused, actual = step(fused, device, autocast=autocast)
    assert_same(actual, step(stock, device, autocast=autocast)[1])
    # PEFT has another formula for quantised linears without autocast; under fp16's some of them return bf16.
    is_taken = bits == "16 bits" or autocast == BF16
    assert ran_fused == (is_fused and is_taken) or (autocast == FP16 and bits != "16 bits")


# ---- Changes after the patch ----


def with_two_active(layer: Any) -> None:
    layer.update_layer("other", RANK, lora_alpha=4, config=peft.LoraConfig(r=RANK))
    for part in (layer.lora_A, layer.lora_B):
        with_integers(part["other"].weight)
    layer.set_adapter(["default", "other"])


class Doubling(Tensor):
    """A weight of another class that doubles its products."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(Tensor) * 2 if func is nn.functional.linear else result


def of_another_class(layer: Any, part: str) -> None:
    product = getattr(layer, part)["default"]
    product.weight = nn.Parameter(product.weight.detach().as_subclass(Doubling))


class Tripling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


def for_all_columns(layer: Any) -> None:
    """Keep a single row for all columns of the output: PyTorch's add broadcasts it."""
    product = layer.lora_B["default"]
    product.weight = nn.Parameter(product.weight.detach()[:1].clone())


def with_a_bias(layer: Any) -> None:
    product = layer.lora_B["default"]
    product.bias = nn.Parameter(torch.ones_like(product.weight[:, 0]))


def with_scale(scale: Any) -> Callable[[Any], Any]:
    return lambda layer: layer.scaling.update(default=scale)


def returning(dtype: torch.dtype) -> Callable[[Any], Any]:
    """Return a change that gives the linear's output this dtype instead of autocast's."""
    return lambda layer: layer.base_layer.register_forward_hook(lambda _, __, y: y.to(dtype))


CHANGES: dict[str, tuple[Callable[[Any], Any], bool, str | None]] = {
    "a scale of 3": (with_scale(3.0), True, None),
    "an integer of 0 for a scale": (with_scale(0), True, None),
    "a tensor for a scale": (with_scale(torch.tensor(3.0)), False, "its scale is a tensor"),
    "dropout": (lambda layer: layer.lora_dropout.update({"default": nn.Dropout(0.5)}), True, None),
    "no adapter active": (lambda layer: setattr(layer, "_active_adapter", []), False, None),
    "an absent adapter active": (lambda layer: setattr(layer, "_active_adapter", ["elsewhere"]), False, None),
    "switched off": (lambda layer: layer.enable_adapters(False), False, None),
    "merged": (lambda layer: layer.merge(), False, None),
    "two adapters active": (with_two_active, False, "it has 2 active adapters"),
    "a first factor of another class": (partial(of_another_class, part="lora_A"), False, "a is a Doubling"),
    "a second factor of another class": (partial(of_another_class, part="lora_B"), False, "b is a Doubling"),
    "another class of product": (
        lambda layer: setattr(layer.lora_A["default"], "__class__", Tripling), False, "its adapter has a Tripling"
    ),
    "one row for all columns": (for_all_columns, False, "base"),
    "factors of two dtypes": (lambda layer: layer.lora_B.to(BF16), True, None),
    "a bias of a factor": (with_a_bias, False, "its adapter has a bias"),
    "a linear that returns float32": (returning(FP32), True, None),
    "a linear that returns float16": (returning(FP16), False, "x is torch.bfloat16 and base torch.float16"),
}  # fmt: skip
"""A change of a layer, whether it then runs fused, and how the logged reason begins, if any is logged."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_layer_that_is_changed_after_the_patch_has_pefts_bits(name: str, device: str, logged: Any) -> None:
    change, is_fused, reason = CHANGES[name]
    assert_pefts_bits(device, change, is_fused=is_fused)
    assert [message.partition(", ")[0] for message in logged()] == ([] if reason is None else [reason])


def test_a_scale_that_is_set_between_a_forward_and_its_backward_is_for_the_next_forward(device: str) -> None:
    assert_pefts_bits(device, between=lambda layer: layer.set_scale("default", 3))


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_factors_that_do_not_fit_raise_as_in_peft(part: str, device: str) -> None:
    for model in pair(device):
        product = getattr(layer_of(model), part)["default"]
        product.weight = nn.Parameter(product.weight.detach()[:3].repeat(1, 2))
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            step(model, device)


# ---- The order of calls, and their observers ----


@pytest.mark.parametrize("late", [False, True])
def test_random_numbers_are_drawn_in_the_order_of_peft(late: bool, device: str) -> None:
    """A linear that draws random numbers is called before the adapter's dropout."""

    def change(layer: Any) -> None:
        if late:
            layer.base_layer.register_forward_hook(lambda _, __, y: nn.functional.dropout(y, 0.5))
        else:
            layer.base_layer.register_forward_pre_hook(lambda _, args: nn.functional.dropout(args[0], 0.5))

    assert_pefts_bits(device, change, lora_dropout=0.5)


TRIPLED: dict[str, Callable[..., Any]] = {
    "forward_pre_hook": lambda _, args: (args[0] * 3,),
    "forward_hook": lambda _, __, y: y * 3,
    "full_backward_pre_hook": lambda _, dys: (dys[0] * 3,),
    "full_backward_hook": lambda _, dxs, __: (dxs[0] * 3,),
}


@pytest.mark.parametrize(
    ("part", "seen"),
    [
        *itertools.product(["lora_A", "lora_B", "base_layer"], ("a forward", *TRIPLED)),
        *(("lora_dropout", seen) for seen in TRIPLED),  # it has no weight
    ],
)
def test_what_other_code_has_put_on_a_part_of_a_layer_runs(part: str, seen: str, device: str) -> None:
    """The other code multiplies its tensors by three."""

    def change(layer: Any) -> None:
        product = getattr(layer, part)
        product = product["default"] if isinstance(product, nn.ModuleDict) else product
        if seen == "a forward":
            product.forward = lambda x: 3 * nn.functional.linear(x, product.weight)
        else:
            getattr(product, f"register_{seen}")(TRIPLED[seen])

    assert_pefts_bits(device, change, lora_dropout=0.5 if part == "lora_dropout" else 0.0)


# ---- Calls ----


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("factor", [BF16, FP16, FP32], ids=str)
def test_an_input_is_rounded_to_the_first_factors_dtype_before_it_is_dropped(
    factor: torch.dtype, dtype: torch.dtype, p: float, device: str
) -> None:
    """Small numbers are zero in float16, and dropout's scaling of some rounds otherwise in 16 bits."""
    stock, fused = pair(device, lora_dropout=p)
    x = torch.cat([torch.randint(-9, 10, (7, WIDTH)), torch.randint(-9, 10, (7, WIDTH)) * 2.0**-30]).to(device, dtype)
    outputs = []
    for model in (stock, fused):
        layer_of(model).lora_A.to(factor)
        torch.manual_seed(4)
        with called_operators() as called, torch.autocast(device, BF16):
            outputs.append(model(x))
    assert any(name.startswith("lora_") for name in called)
    assert torch.equal(*outputs)


def test_further_arguments_reach_the_linear(device: str) -> None:
    layers = [layer_of(model) for model in pair(device)]
    x = torch.randint(-1, 2, (3, WIDTH)).to(device, BF16)
    for layer in layers:
        layer.base_layer.forward = lambda x, factor=1.0, w=layer.base_layer.weight: factor * nn.functional.linear(x, w)
    outputs = [layer(x, factor=3.0) for layer in layers]
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], layers[0](x))


@pytest.mark.parametrize("autocast", [BF16, None])
def test_inside_disabled_pefts_code_runs_and_nothing_is_logged(
    autocast: torch.dtype | None, device: str, logged: Callable[[], list[str]]
) -> None:
    stock, fused = pair(device)
    layer_of(fused).lora_A["default"].register_forward_hook(lambda *_: None)
    with fused_norm.disabled():
        ran_fused, actual = step(fused, device, autocast=autocast)
    assert not ran_fused
    assert_same(actual, step(stock, device, autocast=autocast)[1])
    assert logged() == []


def test_a_batch_of_several_adapters_is_pefts(device: str) -> None:
    models = pair(device)
    x = torch.randn(3, 5, WIDTH, device=device, dtype=BF16)
    with torch.no_grad(), torch.autocast(device, BF16):
        results = [model.eval()(x, adapter_names=["default", "__base__", "default"]) for model in models]
    assert torch.equal(*results)


def test_inputs_of_other_classes_shapes_and_dtypes_have_pefts_outputs(device: str) -> None:
    inputs: list[Tensor] = [
        torch.randn(0, 5, WIDTH, dtype=BF16),
        torch.randn(WIDTH, dtype=BF16),
        torch.randn(5, 3, WIDTH, dtype=BF16).transpose(0, 1),
        torch.randint(-1, 2, (2, WIDTH)).to(FP16),
        torch.randint(-1, 2, (2, WIDTH)).float(),
        torch.randint(-1, 2, (2, WIDTH)).to(BF16).as_subclass(Subclass),
    ]
    models = pair(device)
    for x in inputs:
        with torch.autocast(device, BF16):
            expected, actual = [model(x.to(device)) for model in models]
        assert (actual.dtype, type(actual)) == (expected.dtype, type(expected))
        torch.testing.assert_close(actual, expected, rtol=2**-6, atol=2**-5)


def test_a_gradient_of_an_input_in_float32_is_differentiated_again(device: str) -> None:
    seconds = []
    for model in pair(device):
        x = torch.linspace(-1, 1, 5 * WIDTH, device=device).view(5, WIDTH).requires_grad_()
        with torch.autocast(device, BF16):
            y = model(x)
        weight = layer_of(model).lora_A["default"].weight
        (da,) = torch.autograd.grad(y.float().square().sum(), weight, create_graph=True)
        seconds += torch.autograd.grad(da.square().sum(), x)
    expected, actual = seconds
    assert relative(actual, expected) < 2e-2
