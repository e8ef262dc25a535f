"""Each linear that reads a norm gets a separate output of it, with the bits of a shared output."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import fused_norm
from fused_norm.model_configs import build

from .forwards import layer_of
from .models import assert_all_near, assert_gradients_near, fused_copy, gradients_of, relative, slow, tokens

BF16, FP32 = torch.bfloat16, torch.float32
HOW = {
    "bf16": (BF16, False, None),
    "autocast": (FP32, True, None),
    "adapters": (BF16, True, 0.0),
    "adapters with dropout": (BF16, True, 0.1),
    "adapters in fp32 beside bf16": (BF16, False, 0.0),
}
"""The dtype of a model, whether it runs under autocast, and the dropout of its adapters."""


def model_of(family: str, how: str, device: str) -> nn.Module:
    dtype, _, dropout = HOW[how]
    torch.manual_seed(0)
    model = build(family, seed=0, dtype=dtype, device=device)
    if dropout is None:
        return model
    lora = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout, init_lora_weights=False)
    return peft.get_peft_model(model, lora)


def autocast(device: str, how: str = "autocast") -> Any:
    return torch.autocast(device, BF16, enabled=HOW[how][1])


def logits_of(model: nn.Module, device: str, how: str = "autocast") -> Tensor:
    with autocast(device, how):
        return model(input_ids=tokens(device), use_cache=False).logits


def step(model: nn.Module, how: str, device: str) -> dict[str, Tensor]:
    """Return logits, and the gradients of all parameters and hidden states."""
    ids = tokens(device)
    torch.manual_seed(3)
    with autocast(device, how):
        output = model(input_ids=ids, labels=ids, use_cache=False, output_hidden_states=True)
    tensors = {f"hidden {i}": state for i, state in enumerate(output.hidden_states) if state.requires_grad}
    tensors |= {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    gradients = torch.autograd.grad(output.loss, list(tensors.values()), allow_unused=True)
    assert all(gradient is not None for gradient in gradients)
    return dict(zip(tensors, gradients, strict=True)) | {"logits": output.logits.detach()}


def pair(family: str, how: str, device: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return a fused model whose linears share an input, and a fused model whose linears have separate inputs."""
    without = model_of(family, how, device)
    within = copy.deepcopy(without)
    fused_norm.apply_fused_norm(without, consumers=False)
    report = fused_norm.apply_fused_norm(within, **options)
    assert [row.reason for row in report.consumers] == [None] * 2 * within.config.num_hidden_layers
    return without, within


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert equal bits; nearly equal numbers on a GPU, where a kernel of other dtypes may add up in another order."""
    assert_all_near(actual, expected, 2e-3 if next(iter(actual.values())).is_cuda else 0.0)


@contextlib.contextmanager
def inputs_of_linears() -> Iterator[list[Tensor]]:
    """Yield a list of the inputs of linears, in the order of their calls."""
    inputs: list[Tensor] = []

    def noted(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is nn.Linear.forward.__code__:
            inputs.append(frame.f_locals["input"])

    before = sys.getprofile()
    sys.setprofile(noted)  # a replacement of the linears' code would be noticed
    try:
        yield inputs
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize(
    ("family", "how"),
    [
        *(("qwen3", "bf16"), ("gemma3_text", "autocast"), ("llama", "adapters with dropout")),
        *(("llama", "adapters in fp32 beside bf16"), slow("gemma2", "adapters"), slow("granite", "autocast")),
    ],
)
def test_every_bit_is_that_of_one_output(family: str, how: str, device: str) -> None:
    without, within = pair(family, how, device)
    assert_same(step(within, how, device), step(without, how, device))


@pytest.mark.parametrize("how", ["autocast", slow("adapters")])
def test_what_is_recomputed_has_the_same_bits(how: str, device: str) -> None:
    without, within = pair("qwen3", how, device, recompute=True)
    assert_same(step(within, how, device), step(without, how, device))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_have_the_same_bits(reentrant: bool, device: str) -> None:
    models = pair("llama", "autocast", device)
    for model in models:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    ids = tokens(device)
    for model in models:
        with autocast(device):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert_same(*map(gradients_of, models))


def test_linears_read_outputs_of_their_own_in_the_dtype_that_autocast_casts_to(device: str) -> None:
    without, within = pair("llama", "autocast", device)
    for model, dtype, tensors in ((without, FP32, 1), (within, BF16, 3)):
        with inputs_of_linears() as inputs:
            logits_of(model, device)
        q, k, v, _, gate, up, _ = inputs[:7]
        assert {x.dtype for x in (q, k, v, gate, up)} == {dtype}
        assert len({id(x) for x in (q, k, v)}) == tensors
        assert len({x.data_ptr() for x in (q, k, v)}) == 1
        assert (gate is up) == (model is without)


def test_a_compiled_attention_gets_what_a_stock_norm_returns(device: str) -> None:
    model = build("llama", seed=0, device=device)
    fused_norm.apply_fused_norm(model)
    arguments: list[Any] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        arguments.extend(inputs)
        return graph

    model.model.layers[0].self_attn.compile(backend=backend)
    logits_of(model, device)
    hidden = [x for x in arguments if isinstance(x, Tensor) and x.shape[-1] == model.config.hidden_size]
    assert [x.dtype for x in hidden if x.dim() == 3] == [FP32]


def test_switched_off_and_removed_all_read_one_tensor(device: str) -> None:
    model = build("llama", seed=0, device=device)
    fused_norm.apply_fused_norm(model)

    def read() -> int:
        with inputs_of_linears() as inputs:
            logits_of(model, device)
        return len({id(x) for x in inputs[:3]})

    assert read() == 3
    with fused_norm.disabled():
        assert read() == 1
    fused_norm.apply_fused_norm(model, consumers=False)
    assert read() == 1
    fused_norm.apply_fused_norm(model)
    assert read() == 3
    fused_norm.remove_fused_norm(model)
    assert read() == 1
    assert not any("fused_norm" in type(module).__module__ for module in model.modules())


def test_a_block_that_reads_a_norm_otherwise_has_a_row_with_the_reason(device: str) -> None:
    report = fused_norm.apply_fused_norm(build("qwen3_moe", seed=0, device=device))
    reasons = {row.path.rpartition(".")[2]: row.reason for row in report.consumers if row.reason is not None}
    assert reasons.keys() == {"mlp"}
    assert reasons["mlp"].startswith("its forward reads hidden_states in hidden_states.")
    assert reasons["mlp"] in " ".join(str(report).split())
    assert '"consumers": [' in report.to_json()


class Rounding(TorchFunctionMode):
    """A mode that doubles the result of ``torch.nn.functional.linear``, like a mode that quantises or calibrates."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        return 2 * y if func is functional.linear else y


LINEAR, FORWARD = functional.linear, nn.Linear.forward


def replaced_function() -> Any:
    return mock.patch.object(functional, "linear", lambda *args: 2 * LINEAR(*args))


def replaced_forward() -> Any:
    return mock.patch.object(nn.Linear, "forward", lambda self, x: 2 * FORWARD(self, x.float().to(self.weight.dtype)))


def wrapped_forward() -> Any:
    """Wrap the forward of linears in a function of the same name, as instrumentation does."""
    return mock.patch.object(nn.Linear, "forward", functools.wraps(FORWARD)(lambda self, x: 2 * FORWARD(self, x)))


@contextlib.contextmanager
def swapped_code() -> Iterator[None]:
    """Give the forward of linears the code of another function."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.matmul(x.float(), self.weight.T.float()) * 2

    before = nn.Linear.forward.__code__
    nn.Linear.forward.__code__ = forward.__code__
    try:
        yield
    finally:
        nn.Linear.forward.__code__ = before


REPLACED = [replaced_function, replaced_forward, wrapped_forward, swapped_code, Rounding]


@pytest.mark.parametrize(
    ("how", "is_patched_inside"),
    [("autocast", False), ("adapters", True), ("adapters in fp32 beside bf16", False)],
)
@pytest.mark.parametrize("replaced", REPLACED)
def test_linears_that_other_code_has_replaced_run_as_in_stock(
    replaced: Callable[[], Any], how: str, is_patched_inside: bool, device: str
) -> None:
    model = model_of("llama", how, device)
    fused = copy.deepcopy(model) if is_patched_inside else fused_copy(model)
    with torch.set_grad_enabled(is_patched_inside), replaced():
        report = fused_norm.apply_fused_norm(fused) if is_patched_inside else None
        stock_logits, logits = (logits_of(variant, device, how) for variant in (model, fused))
    assert report is None or not any(row.kind in ("adapter", "loss") for row in report.fused)
    assert relative(logits, stock_logits) < 2e-2


class Plain(nn.Module):
    """A block that calls linears of a norm's result."""

    def __init__(self, context: Callable[[], Any]) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(64, 8), nn.Linear(64, 8)
        self.context = context

    def forward(self, hidden: Tensor) -> Tensor:
        return self.q(hidden) + self.k(hidden)


class Inside(Plain):
    """A block that calls its linears inside a context."""

    def forward(self, hidden: Tensor) -> Tensor:
        with self.context():
            return self.q(hidden) + self.k(hidden)


class ByCalls(Plain):
    """A block that changes autocast by functions."""

    def forward(self, hidden: Tensor) -> Tensor:
        before = torch.get_autocast_dtype(hidden.device.type)
        torch.set_autocast_dtype(hidden.device.type, torch.float16)
        y = self.q(hidden) + self.k(hidden)
        torch.set_autocast_dtype(hidden.device.type, before)
        return y


class ByCall(Plain):
    """A block that is called inside a context."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.context():
            return super().__call__(*args, **kwargs)


class Decorated(Plain):
    """A block whose forward is decorated with a context."""

    @torch.autocast("cpu", torch.float16)
    @torch.autocast("cuda", torch.float16)
    def forward(self, hidden: Tensor) -> Tensor:
        return self.q(hidden) + self.k(hidden)


class Layer(nn.Module):
    """A norm and its consumer: each may run in a context."""

    def __init__(self, attention: nn.Module, context: Callable[[], Any]) -> None:
        super().__init__()
        self.norm, self.attention = LlamaRMSNorm(64), attention
        self.context = context


NORM, ATTENTION = "hidden = self.norm(hidden)", "hidden = self.attention(hidden)"
INSIDE = "with self.context():\n    "
PLAIN, NORM_INSIDE, CONSUMER_INSIDE, ENTERED = (
    layer_of("\n".join(["residual = hidden", *lines, "return residual + hidden.repeat(1, 1, 8)"]), "hidden", base=Layer)
    for lines in (
        (NORM, ATTENTION),
        (f"{INSIDE}{NORM}", ATTENTION),
        (NORM, f"{INSIDE}{ATTENTION}"),
        (NORM, "context = self.context()", "context.__enter__()", ATTENTION, "context.__exit__(None, None, None)"),
    )
)


PLACES: dict[str, tuple[type[Layer], type[Plain]]] = {
    "in the block": (PLAIN, Inside),
    "in the block, by functions": (PLAIN, ByCalls),
    "around the block's call": (PLAIN, ByCall),
    "on the block's forward": (PLAIN, Decorated),
    "around the norm": (NORM_INSIDE, Plain),
    "around the block": (CONSUMER_INSIDE, Plain),
    "entered before the block": (ENTERED, Plain),
}
"""A layer and its block, by the place of a context of autocast."""


@pytest.mark.parametrize("context", ["off", "float16", "nothing"])
@pytest.mark.parametrize("place", PLACES)
def test_linears_read_what_the_autocast_of_their_own_call_makes_of_a_norm(
    place: str, context: str, device: str
) -> None:
    layer, block = PLACES[place]
    contexts: dict[str, Callable[[], Any]] = {
        "off": lambda: torch.autocast(device, enabled=False),
        "float16": lambda: torch.autocast(device, torch.float16),
        "nothing": contextlib.nullcontext,
    }
    torch.manual_seed(0)
    model = nn.ModuleList([layer(block(contexts[context]), contexts[context])])
    model[0].norm.weight.data.normal_()
    model = model.to(device)
    fused = copy.deepcopy(model)
    assert [site.path for site in fused_norm.apply_fused_norm(fused, strict=False).fused][:1] == ["0.norm"]
    x = torch.randn(2, 3, 64, device=device)
    outcomes = []
    for layers in (model, fused):
        leaf = x.clone().requires_grad_()
        with autocast(device):
            y = layers[0](leaf)
        y.float().square().sum().backward()
        outcomes.append([y, leaf.grad, *(p.grad for p in layers.parameters())])
    assert_all_near(*reversed(outcomes), 5e-4)


def checkpointed(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn, layer.mlp = checkpoint_wrapper(layer.self_attn), checkpoint_wrapper(layer.mlp)


def offloaded(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp = offload_wrapper(layer.mlp)


class Forwarding(nn.Module):
    """A wrapper with all attributes of the module inside."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["inside"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._modules["inside"](*args, **kwargs)  # type: ignore[misc]


def around_everything(model: Any) -> None:
    for layer in model.model.layers:
        for name, child in list(layer.named_children()):
            setattr(layer, name, Forwarding(child))
        for inside in (layer.self_attn.inside, layer.mlp.inside):
            for name, child in list(inside.named_children()):
                setattr(inside, name, Forwarding(child))


@pytest.mark.parametrize("wrap", [checkpointed, offloaded, around_everything])
def test_wrappers_that_come_after_the_patch_and_forward_attributes_change_nothing(
    wrap: Callable[[Any], None], device: str
) -> None:
    _, fused = pair("llama", "autocast", device)
    wrapped = copy.deepcopy(fused)
    wrap(wrapped)
    ids, steps = tokens(device), []
    for model in (fused, wrapped):
        with autocast(device):
            output = model(input_ids=ids, labels=ids, use_cache=False)
        output.loss.backward()
        steps.append({"loss": output.loss.detach()} | {str(i): p.grad for i, p in enumerate(model.parameters())})
    assert_gradients_near(steps[1], steps[0], 2e-2)


def test_a_copy_of_an_mlp_that_peft_trains_whole_is_called_as_in_stock(device: str) -> None:
    models = [build("llama", seed=0, device=device) for _ in range(2)]
    fused_norm.apply_fused_norm(models[1])
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["mlp"])
    stock, fused = (logits_of(peft.get_peft_model(model, copy.deepcopy(lora)), device) for model in models)
    assert relative(fused, stock) < 2e-2


def test_a_forward_put_on_pefts_class_after_the_patch_reads_what_a_stock_norm_returns(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama", "adapters in fp32 beside bf16", device).float()
    fused = fused_copy(model)
    dtypes: list[torch.dtype] = []

    def forward(self: Any, x: Tensor) -> Tensor:
        dtypes.append(x.dtype)
        return self.base_layer(x)

    monkeypatch.setattr(peft.tuners.lora.Linear, "forward", forward)
    stock_logits, logits = (logits_of(variant, device) for variant in (model, fused))
    assert dtypes[: len(dtypes) // 2] == dtypes[len(dtypes) // 2 :]
    assert relative(logits, stock_logits) < 2e-2


def test_a_hook_on_a_dropout_that_is_idle_sees_what_it_sees_in_stock(device: str) -> None:
    model = model_of("llama", "adapters", device)
    dtypes: list[list[torch.dtype]] = []
    for variant in (model, fused_copy(model)):
        dtypes.append([])
        for module in variant.modules():
            if isinstance(module, nn.ModuleDict) and "default" in module and isinstance(module.default, nn.Identity):
                module.default.register_forward_hook(lambda _, args, __, to=dtypes[-1]: to.append(args[0].dtype))
        logits_of(variant, device)
    assert dtypes[0]
    assert dtypes[0] == dtypes[1]
