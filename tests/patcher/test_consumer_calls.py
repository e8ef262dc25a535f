"""A norm's consumers are asked at every call, which has its own hooks, adapters, weights and dtypes."""

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

import fused_norm
from fused_norm.patcher import fused_norm_module

from .models import Subclass, equal_in_fp32, fused_copy, relative
from .test_consumer_contracts import (
    BF16,
    BLOCK,
    FP32,
    MOST_CONSUMERS,
    WIDTH,
    assert_near,
    assert_same_bits,
    build_model,
    compare,
    own_inputs,
    step,
)

FP16 = torch.float16


def adapted(*names: str, dtype: torch.dtype = FP32, block: str = BLOCK, **config: Any) -> nn.Module:
    """Return a model whose block has LoRA adapters on the linears of these names."""
    model = build_model(dtype=dtype, block=block)
    lora = peft.LoraConfig(r=4, target_modules=list(names), init_lora_weights=False, **config)
    peft.inject_adapter_in_model(lora, model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    return model


def block_of(model: nn.Module) -> Any:
    return model.layers[0].block


# ---- Hooks and other observers of a call ----

Seen = list[Tensor | None]


def noted(module: nn.Module, how: str, seen: Seen) -> None:
    """Let a hook, or another forward, append the tensors that it sees of a module's calls to ``seen``."""

    def note(_: nn.Module, *tensors: Any) -> None:
        for tensor in tensors:
            seen.extend(tensor if isinstance(tensor, tuple) else [tensor])

    if how == "forward":
        forward = module.forward

        def observed(x: Tensor) -> Tensor:
            y = forward(x)
            note(module, x, y)
            return y

        module.forward = observed
    else:
        getattr(module, f"register_{how}")(note)


PLACES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "a linear": lambda model: block_of(model).k,
    "a LoRA layer": lambda model: block_of(model).q,
    "the linear in a LoRA layer": lambda model: block_of(model).q.base_layer,
    "the first factor of an adapter": lambda model: block_of(model).q.lora_A["default"],
    "the second factor of an adapter": lambda model: block_of(model).q.lora_B["default"],
    "the block": block_of,
    "the norm": lambda model: model.layers[0].norm,
}
HOOKS = ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook")


@pytest.mark.parametrize(
    ("place", "how"),
    [
        *((place, how) for place in ("a linear", "the block", "the norm") for how in (*HOOKS, "forward")),
        *((place, how) for place in PLACES if "LoRA" in place for how in (*HOOKS[::2], "forward")),
        *((place, "forward_hook") for place in PLACES if "factor" in place),
    ],
)
def test_who_sees_a_call_sees_what_it_would_see_of_stock(place: str, how: str, device: str) -> None:
    stock = adapted("q")
    seen: list[Seen] = []
    steps = []
    shared = fused_copy(stock, strict=False, consumers=False)
    for model in (fused_copy(stock, strict=False), shared, stock):
        seen.append([])
        noted(PLACES[place](model), how, seen[-1])
        steps.append(step(model, device))
    assert own_inputs(steps[0][0]) == 0
    assert_near(steps[0], steps[2])
    assert len(seen[0]) > 0
    for mine, without, theirs in zip(*seen, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or (mine.dtype == theirs.dtype and relative(mine, theirs) < 2e-2)
        assert mine is None or equal_in_fp32(mine, without)
    assert_same_bits(steps[0], steps[1])


@pytest.mark.parametrize("register", ["register_module_forward_pre_hook", "register_module_full_backward_hook"])
def test_hooks_on_all_modules_see_what_they_would_see_of_stock(register: str, device: str) -> None:
    model = build_model()
    seen: list[list[tuple[type, torch.dtype]]] = []

    def note(module: nn.Module, *tensors: Any) -> None:
        if type(module) is nn.Linear:
            seen[-1] += [(type(module), tensor.dtype) for tensor in tensors[0] if tensor is not None]

    handle = getattr(nn_module, register)(note)
    try:
        for variant in (model, fused_copy(model, strict=False)):
            seen.append([])
            step(variant, device)
    finally:
        handle.remove()
    assert len(seen[0]) >= 3
    assert seen[0] == seen[1]


def test_a_forward_that_a_blocks_class_gets_later_reads_what_it_would_of_stock(device: str) -> None:
    model = build_model()
    fused = fused_copy(model, strict=False)
    type(block_of(model)).forward = lambda self, x: self.q(x) * 2 + x
    actual, expected = step(fused, device), step(model, device)
    assert own_inputs(actual[0]) == 0
    assert_near(actual, expected)


def test_a_forward_that_a_fused_block_gets_later_reads_what_it_would_of_stock(device: str) -> None:
    model = build_model()
    fused, seen = fused_copy(model, strict=False), []
    cls = type(block_of(fused))
    forward = cls.forward
    cls.forward = lambda self, x: seen.append(x.dtype) or forward(self, x)
    try:
        actual = step(fused, device)
    finally:
        cls.forward = forward
    assert seen == [FP32]
    assert own_inputs(actual[0]) == 0
    assert_near(actual, step(model, device))


class Noting(Tensor):
    """A weight that notes the dtypes of the inputs of linears."""

    dtypes: ClassVar[list[torch.dtype]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            cls.dtypes.append(args[0].dtype)
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(Tensor) if func is nn.functional.linear else result


@pytest.mark.parametrize("place", ["a linear", "the linear in a LoRA layer"])
def test_a_weight_of_another_class_sees_the_norm_of_stock(place: str, device: str) -> None:
    stock = adapted("q")
    steps = []
    for model in (fused_copy(stock, strict=False), stock):
        linear = PLACES[place](model.to(device))
        linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Noting), requires_grad=False)
        Noting.dtypes.clear()
        steps.append(step(model, device))
        assert Noting.dtypes == [FP32]
    assert own_inputs(steps[0][0]) == 0
    assert_near(*steps)


def test_an_input_of_another_class_is_stocks(device: str) -> None:
    model = build_model().to(device)
    x = torch.randn(2, 3, WIDTH, device=device)
    variants = fused_copy(model, strict=False), model
    with torch.autocast(device, BF16):
        outputs = [variant.layers[0](x.clone().as_subclass(Subclass)) for variant in variants]
    assert type(outputs[0]) is type(outputs[1]) is Subclass
    assert_near([outputs[0]], [outputs[1]])


def test_a_linear_that_is_gone_or_another_module_is_not_asked(device: str) -> None:
    block = "return self.q(x) * 2 if self.v is None else self.q(x) + self.v(x)"
    derived = type("Other", (nn.Linear,), {})(WIDTH, WIDTH)
    for replacement in (None, nn.Identity(), derived, nn.Sequential(nn.Linear(WIDTH, WIDTH))):
        model = build_model(block=block)
        fused = fused_copy(model, strict=False)
        assert own_inputs(step(fused, device)[0]) == 3
        for variant in (fused, model):
            block_of(variant).v = copy.deepcopy(replacement)
        actual = step(fused, device)
        assert own_inputs(actual[0]) == 0
        assert_near(actual, step(model, device))


# ---- Adapters ----


def of_block(change: Callable[[Any], Any], *names: str) -> Callable[[nn.Module], Any]:
    def changed(model: nn.Module) -> None:
        for name in names:
            change(getattr(block_of(model), name))

    return changed


def in_dtype(dtype: torch.dtype, part: str) -> Callable[[nn.Module], Any]:
    return of_block(lambda layer: getattr(layer, part).to(dtype), "q")


def with_dropout(layer: Any, p: float = 0.5) -> None:
    layer.lora_dropout["default"] = nn.Dropout(p)


def with_its_own_dropout(layer: Any) -> None:
    class Dropout(nn.Dropout):
        pass

    layer.lora_dropout["default"] = Dropout(0.5)


def in_evaluation(layer: Any) -> None:
    with_dropout(layer)
    layer.eval()


ADAPTERS: dict[str, tuple[Callable[[nn.Module], Any], int]] = {
    "nothing": (lambda model: None, 4),
    "dropout that may drop": (of_block(with_dropout, "q"), 3),  # which reads float32
    "dropout of another class": (of_block(with_its_own_dropout, "q"), 3),
    "dropout of nothing": (of_block(partial(with_dropout, p=0.0), "q"), 4),
    "dropout in evaluation": (of_block(in_evaluation, "q"), 4),
    "a first factor in 16 bits": (in_dtype(BF16, "lora_A"), 4),
    "a first factor in the other 16 bits": (in_dtype(FP16, "lora_A"), 3),
    "a second factor in 16 bits": (in_dtype(BF16, "lora_B"), 4),
    "its input uncast": (of_block(lambda layer: setattr(layer, "cast_input_dtype_enabled", False), "q"), 4),
    "switched off": (of_block(lambda layer: layer.enable_adapters(False), "q"), 0),
    "merged": (of_block(lambda layer: layer.merge(), "q"), 0),
    "none active": (of_block(lambda layer: setattr(layer, "_active_adapter", []), "q"), 0),
    "a frozen norm": (lambda model: model.layers[0].norm.requires_grad_(False), 4),
}
"""A change of a LoRA layer after a first step, and how many linears and adapters then have separate 16-bit inputs."""


@pytest.mark.parametrize("name", ADAPTERS)
def test_what_an_adapter_reads_is_asked_at_each_call(name: str, device: str) -> None:
    change, expected = ADAPTERS[name]
    compare(adapted("q"), expected, device, change)


def test_outputs_are_counted_at_each_call(device: str) -> None:
    """A LoRA layer that replaces a linear reads two outputs of the norm, the linear only one."""
    stock = adapted("q", "k", block="return self.q(x) - self.k(x) * self.v(x) + self.v(x)")
    steps = []
    for model in (fused_copy(stock, strict=False), stock):
        assert model is stock or own_inputs(step(model, device)[0]) == MOST_CONSUMERS
        block_of(model).v = copy.deepcopy(block_of(model).q)
        steps.append(step(model, device))
    assert own_inputs(steps[0][0]) == 0
    assert_near(*steps)


@pytest.mark.parametrize("names", ["q", "kv", "qkv"])
def test_every_linear_and_every_adapter_gets_the_output_that_is_its_own(names: str, device: str) -> None:
    """All gradients differ, so that a swap of two would show."""
    compare(adapted(*names), 3 + len(names), device)


def test_adapters_that_came_after_the_patch_are_named_where_they_run_and_not_inside_disabled(
    device: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_norm_module, "_warned", {})
    model = fused_copy(build_model(), strict=False)
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["q"], init_lora_weights=False), model)
    with fused_norm.disabled():
        step(model, device)
    assert caplog.messages == []
    assert own_inputs(step(model, device)[0]) == 0
    assert ["come since the model was patched" in message for message in caplog.messages] == [True]


# ---- Dtypes ----


@pytest.mark.parametrize(
    ("dtype", "norm", "autocast"),
    [(FP32, FP32, BF16), (FP32, BF16, FP16), (BF16, FP32, BF16), (BF16, BF16, FP16), (FP16, BF16, BF16)],
    ids=str,
)
def test_a_norm_is_written_in_autocasts_dtype_if_it_would_be_float32(
    dtype: torch.dtype, norm: torch.dtype, autocast: torch.dtype, device: str
) -> None:
    stock = build_model(dtype=dtype)
    stock.layers[0].norm.to(norm)
    written = autocast if FP32 in (dtype, norm) else torch.promote_types(dtype, norm)
    compare(stock, 3, device, autocast=autocast, dtype=written)


def test_a_block_that_is_called_by_hand_takes_any_tensor_any_number_of_times(device: str) -> None:
    model = build_model().to(device)
    fused = fused_copy(model, strict=False)
    x = torch.randn(2, 3, WIDTH, device=device)
    step(fused, device)
    with torch.autocast(device, BF16):
        h = fused.layers[0].norm(x)
        results = [block_of(variant)(h) for variant in (fused, fused, model)]
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[2])
