"""LoRA layers around 4-bit linears: the bits of PEFT's and bitsandbytes' code, whatever changes at a call."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModel

import fused_norm
from fused_norm.kernels.operator import OPERATORS
from fused_norm.patcher import adapters, four_bit, recompute_linears

from .models import EXPERTS_ARE_MLPS, assert_same, relative, slow
from .ranks import called_operators, on_two_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def quantised(linear: nn.Linear, device: str, **options: Any) -> Linear4bit:
    """Return the linear in 4 bits; ``options``: those of ``Params4bit``, and ``compute_dtype``."""
    compute_dtype = options.pop("compute_dtype", BF16)
    layer = Linear4bit(linear.in_features, linear.out_features, linear.bias is not None, compute_dtype, device="meta")
    layer.weight = Params4bit(linear.weight.detach(), **{"quant_type": "nf4", "requires_grad": False} | options)
    layer.bias = linear.bias
    layer = layer.to(device)
    layer.quant_state, layer.quant_storage = layer.weight.quant_state, layer.weight.quant_storage
    return layer


def model_of(device: str, model_type: str = "qwen3", dtype: torch.dtype = BF16, **options: Any) -> Any:
    """Return a model of a single layer for fine-tuning in 4 bits: norms and embeddings in fp32, LoRA on all linears."""
    adapter = {name: options.pop(name) for name in ("lora_dropout", "use_dora", "target_modules") if name in options}
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **sizes, **heads), dtype=dtype)
    for path, linear in list(model.layers.named_modules()):
        if type(linear) is nn.Linear:
            model.layers.set_submodule(path, quantised(linear, device, **options))
    model.is_loaded_in_4bit = True
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    config = peft.LoraConfig(r=4, **{"target_modules": "all-linear"} | adapter, init_lora_weights=False)
    model = peft.get_peft_model(model, config).to(device).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 and parameter.dtype == FP32:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def shape_of_ids(device: str) -> tuple[int, int]:
    """Return the numbers of sequences and of their tokens: on a GPU bitsandbytes has other kernels for fewer rows."""
    return (2, 1024) if device == "cuda" else (1, 5)


def step(
    model: Any, device: str, autocast: torch.dtype | None = BF16, counts: bool = True, hidden_states: bool = True
) -> tuple[list[Tensor], Counter[str]]:
    """Return the last hidden state, gradients of hidden states and trained parameters, and the forward's calls."""
    ids = torch.randint(0, 128, shape_of_ids(device), generator=torch.Generator().manual_seed(1)).to(device)
    torch.manual_seed(5)
    with (
        called_operators() if counts else nullcontext() as called,
        torch.autocast(device, autocast or BF16, enabled=autocast is not None),
    ):
        output = model(input_ids=ids, use_cache=False, output_hidden_states=hidden_states)
    y = output.last_hidden_state
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
    differentiated = [state for state in output.hidden_states or () if state.requires_grad]
    for state in differentiated:
        state.retain_grad()
    differentiated += [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.zero_grad()
    if differentiated:
        y.backward(dy)
    counted = Counter(called.counts if counts else {})
    counted["lora_linear_4bit"] += counted["lora_summands_4bit"]
    return [y.detach(), *(tensor.grad for tensor in differentiated)], +counted


def compare(
    model: Any,
    device: str,
    change: Callable[[Any], Any] = lambda model: None,
    same: Callable[[Tensor, Tensor], bool] | None = None,
    recompute: Any = False,
    shared_inputs: bool = True,
    **how: Any,
) -> Counter[str]:
    """Assert twice the results of PEFT's layers with the same norms; return the calls of the patched model.

    On a GPU the gradients of factors are sums over rows in another order.
    """
    if same is None:
        same = torch.equal if device == "cpu" else near(4e-3)
    fused, stock = copy.deepcopy(model), copy.deepcopy(model)
    fused_norm.apply_fused_norm(fused, strict=False, recompute=recompute, shared_inputs=shared_inputs)
    fused_norm.apply_fused_norm(stock, strict=False, lora=False)
    change(fused), change(stock)
    expected, without = step(stock, device, **how)
    assert not without.keys() & {"lora_linear_4bit", "lora_add", "linear_4bit"}
    for _ in range(2):
        results, counts = step(fused, device, **how)
        different = [
            index for index, (a, b) in enumerate(zip(results, expected, strict=True))
            if not (a is b is None or (a.dtype == b.dtype and same(a, b)))
        ]  # fmt: skip
        assert not different, f"of {len(expected)} tensors these differ: {different}"
    return counts


def near(bound: float) -> Callable[[Tensor, Tensor], bool]:
    return lambda a, b: relative(a, b) < bound


QV = ["q_proj", "v_proj"]
"""The linears that get adapters by default."""


def first_linear(model: Any) -> Any:
    layer = model.base_model.model.layers[0].self_attn.q_proj
    return getattr(layer, "base_layer", layer)


def with_bias(model: Any, dtype: torch.dtype = BF16) -> None:
    base = first_linear(model)
    torch.manual_seed(8)
    base.bias = nn.Parameter(torch.randn(64).to(base.weight.device, dtype), requires_grad=False)


def with_another_weight_and_bias(model: Any) -> None:
    base = first_linear(model)
    torch.manual_seed(7)
    weight = torch.randn(64, 64, dtype=BF16)
    base.weight = quantised_weight = Params4bit(weight, requires_grad=False, quant_type="nf4").to(base.weight.device)
    base.quant_state = quantised_weight.quant_state
    with_bias(model)


def with_a_hook(model: Any) -> None:
    first_linear(model).register_forward_hook(lambda _, __, y: y * 2)


def with_a_state_dict(model: Any) -> None:
    """Move it and load other factors and codes; the state of the quantisation stays, as a linear does not load it."""
    device = next(model.parameters()).device
    model.to("cpu").to(device)
    state = dict(model.state_dict())
    for name, value in state.items():
        if "lora_" in name:
            state[name] = value + 0.1
        elif value.dtype == torch.uint8 and name.endswith(("proj.weight", "base_layer.weight")):
            state[name] = value ^ 0x11
    assert not model.load_state_dict(state, strict=False).missing_keys


def merged(model: Any) -> None:
    model.enable_input_require_grads()  # else there is nothing to differentiate
    model.merge_adapter()


def with_hidden_states_of_16_bits(model: Any) -> None:
    model.get_base_model().embed_tokens.to(BF16)


def checkpointed(model: Any, reentrant: bool = False) -> None:
    model.enable_input_require_grads()
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def nothing(model: Any) -> None:
    pass


V: dict[str, Any] = {"target_modules": ["v_proj"]}
CASES: dict[str, tuple[dict[str, Any], Callable[[Any], Any], tuple[int, int]]] = {
    "all linears": ({}, nothing, (7, 0)),
    "some linears": ({"target_modules": QV}, nothing, (2, 5)),
    "gates alone": ({"target_modules": ["gate_proj"]}, nothing, (1, 6)),
    "sandwich norms": ({"model_type": "gemma3_text"}, nothing, (7, 0)),
    "hidden states of 16 bits": ({}, with_hidden_states_of_16_bits, (7, 0)),
    "hidden states of 16 bits, gemma": ({"model_type": "gemma3_text"}, with_hidden_states_of_16_bits, (7, 0)),
    "scales in float32": ({"compress_statistics": False}, nothing, (7, 0)),
    "packed in bfloat16": ({"quant_storage": BF16}, nothing, (7, 0)),
    "norms and weights of float16": ({"dtype": FP16}, nothing, (0, 0)),
    "another weight and a bias": ({}, with_another_weight_and_bias, (7, 0)),
    "another weight and a bias, without an adapter": (V, with_another_weight_and_bias, (1, 6)),
    # A linear without an adapter is called, so its hooks run.
    "a hook on the linear": ({}, with_a_hook, (6, 0)),
    "a hook on a linear without an adapter": (V, with_a_hook, (1, 6)),
    "a bias in fp32": ({}, lambda model: with_bias(model, FP32), (7, 0)),  # bitsandbytes casts it, for good
    "moved, and a state dict loaded over it": ({}, with_a_state_dict, (7, 0)),
    "moved, and a state dict loaded, without adapters": (V, with_a_state_dict, (1, 6)),
    "merged": ({}, merged, (0, 0)),
    "checkpointed": ({}, checkpointed, (7, 0)),
}
"""Options of a model, a change after the patch, and how many layers then run as one operator with and without LoRA."""
LONG = {"sandwich norms", "gates alone", "packed in bfloat16"}


@pytest.mark.parametrize("case", [slow(case) if case in LONG else case for case in CASES])
def test_a_model_has_the_bits_of_pefts_and_bitsandbytes_layers_whatever_changes(case: str, device: str) -> None:
    options, change, expected = CASES[case]
    counts = compare(model_of(device, **options), device, change)
    assert (counts["lora_linear_4bit"], counts["linear_4bit"]) == expected


@pytest.mark.parametrize(("reentrant", "targets"), [(False, "all-linear"), (True, QV)])
def test_checkpoints_with_dropout_have_the_same_bits(reentrant: bool, targets: Any, device: str) -> None:
    """The call does not request hidden states: transformers would put hooks on attentions for them."""
    model = model_of(device, lora_dropout=0.05, target_modules=targets)
    compare(model, device, partial(checkpointed, reentrant=reentrant), hidden_states=False)


@pytest.mark.parametrize(
    ("autocast", "options", "expected"),
    [
        (None, {}, (0, 6)),  # its input has 16 bits, or float32, and is cast to those
        (FP16, {}, (0, 0)),  # autocast would multiply in the other 16 bits
        (BF16, {"compute_dtype": FP32}, (0, 0)),
    ],
)
def test_autocast_and_dtypes_of_products_decide(
    autocast: torch.dtype | None, options: dict[str, Any], expected: tuple[int, int], device: str
) -> None:
    same = near(1e-6 if device == "cpu" else 4e-3)  # gradients are added up in another order
    counts = compare(model_of(device, **V, **options), device, same=same, autocast=autocast)
    assert (counts["lora_linear_4bit"], counts["linear_4bit"]) == expected


def test_a_gate_adds_what_the_linears_before_it_return_and_casts_for_the_one_after_it(device: str) -> None:
    counts = compare(model_of(device), device)
    assert (counts["lora_summands_4bit"], counts["glu_for_consumers"], counts["glu"]) == (2, 1, 0)


def test_few_rows_are_left_to_a_product_of_bitsandbytes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(four_bit, "_multiplies_itself", lambda state, x, dtype: x.shape[-1] == 64)
    counts = compare(model_of(device, target_modules=["q_proj", "down_proj"]), device)
    assert (counts["lora_linear_4bit"], counts["linear_4bit"]) == (1, 0)  # down_proj reads 128 columns


@pytest.fixture
def masks(device: str, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return a list of the dropout masks drawn for kernels; on a CPU they are those that PyTorch draws for float32."""
    drawn: list[Tensor] = []
    draw = adapters.mask_of_dropout

    def noted(dropout: nn.Dropout, x: Tensor, dtype: torch.dtype) -> Tensor | None:
        mask = draw(dropout, x, dtype)
        if device == "cpu" and dtype == FP32:
            mask = torch.empty(x.shape).bernoulli_(1 - dropout.p) > 0
        if mask is not None:
            drawn.append(mask)
        return mask

    monkeypatch.setattr(adapters, "mask_of_dropout", noted)
    if device == "cpu":
        monkeypatch.setattr(adapters, "dropout_factors", lambda p: (torch.ones(1).div_(1 - p).item(),) * 2)
    return drawn


@pytest.mark.parametrize("recompute", ["mlp", slow(True)], ids=str)
def test_a_model_whose_kernels_drop_has_the_bits_of_pefts_layers(
    recompute: Any, masks: list[Tensor], device: str
) -> None:
    counts = compare(model_of(device, lora_dropout=0.3), device, recompute=recompute)
    assert counts["lora_linear_4bit"] == 7
    # There are two steps. The attention's output has 16 bits, for which a CPU draws other masks.
    assert len(masks) == 2 * (6 if device == "cpu" else 7)


@pytest.mark.parametrize("shared_inputs", [True, False])
def test_what_pytorch_drops_has_the_bits_of_pefts_layers(shared_inputs: bool, device: str, monkeypatch) -> None:
    # Gradients of dropout in float32 have all of its places: their sum depends on its order.
    monkeypatch.setattr(adapters, "mask_of_dropout", lambda *_: None)
    model = model_of(device, lora_dropout=0.3)
    model.enable_input_require_grads()
    assert compare(model, device, shared_inputs=shared_inputs)["lora_linear_4bit"] == 7


def test_the_other_16_bits_are_dropped_by_pytorch_which_rounds_to_them(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[torch.dtype] = []
    monkeypatch.setattr(adapters, "mask_of_dropout", lambda dropout, x, dtype: drawn.append(dtype))
    model = model_of(device, lora_dropout=0.3)
    fused_norm.apply_fused_norm(model, strict=False)
    with torch.autocast(device, BF16):
        for dtype in (FP32, BF16, FP16):
            x = torch.randn(*shape_of_ids(device), 64, device=device).to(dtype)
            model.get_base_model().layers[0].self_attn.v_proj(x)
    assert drawn == [FP32, BF16]


def test_a_mask_that_was_drawn_for_a_call_that_kernels_refuse_is_applied(
    masks: list[Tensor], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lora_linear_4bit", "lora_summands_4bit", "lora_add"):
        monkeypatch.setattr(OPERATORS[name], "try_fused", lambda *_: (None, "refused by a test"))
    assert compare(model_of(device, lora_dropout=0.3), device)["lora_linear_4bit"] == 0
    assert masks


@pytest.mark.parametrize(
    ("function", "targets", "level", "expected"),
    [
        ("_with_adapter", "all-linear", "attention", 5 - EXPERTS_ARE_MLPS),  # transformers 4 keeps a cast of values
        ("_linear_of_4_bits", ["k_proj"], "mlp", 2),
    ],
)
def test_outputs_of_linears_with_and_without_an_adapter_are_recomputed(
    function: str, targets: Any, level: str, expected: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recomputed: list[Any] = []
    compute = getattr(recompute_linears, function)
    noted = lambda *operands, **options: (recomputed.append(options), compute(*operands, **options))[1]  # noqa: E731
    monkeypatch.setattr(recompute_linears, function, noted)
    model = model_of(device, target_modules=targets)
    model.enable_input_require_grads()  # else there is no graph before the first product
    compare(model, device, with_bias, recompute=level, counts=False)
    assert len(recomputed) == 2 * expected  # of two steps


@pytest.mark.slow
@pytest.mark.usefixtures("large_graphs")
def test_compiled_layers_run_pefts_code(device: str) -> None:
    """Gradients are sums in another order."""

    def with_compiled_layers(model: Any) -> None:
        for layer in model.base_model.model.layers:
            layer.compile(backend="aot_eager")

    counts = compare(model_of(device, target_modules=["q_proj"]), device, with_compiled_layers, same=near(4e-3))
    assert +counts == {"rms_norm": 1}, "outside of the layers"


@pytest.mark.parametrize(
    ("targets", "parts"),
    [
        ("all-linear", ["mlp.down_proj", "self_attn.v_proj.base_layer"]),
        ("all-linear", ["mlp.down_proj.lora_A.default", "self_attn.v_proj"]),
        ("all-linear", ["mlp.gate_proj.base_layer", "mlp.act_fn"]),
        (["q_proj"], ["mlp.down_proj", "self_attn.k_proj"]),
        (["q_proj"], ["mlp.up_proj", "mlp.act_fn"]),
    ],
)
def test_who_watches_a_part_of_a_layer_sees_stocks_tensors(targets: Any, parts: list[str], device: str) -> None:
    seen: list[tuple[str, torch.dtype, torch.dtype]] = []

    def watched(model: Any) -> None:
        for part in parts:
            note = lambda _, inputs, y, part=part: seen.append((part, inputs[0].dtype, y.dtype))  # noqa: E731
            model.base_model.model.layers[0].get_submodule(part).register_forward_hook(note)

    compare(model_of(device, target_modules=targets), device, watched)
    assert len(seen) == 3 * len(parts)
    assert len(set(seen)) == len(parts), seen


def test_a_cache_keeps_values_in_the_dtype_that_they_have_in_stock(device: str) -> None:
    model = model_of(device)
    fused = copy.deepcopy(model)
    fused_norm.apply_fused_norm(fused, strict=False)
    with torch.autocast(device, BF16):
        caches = [
            variant(input_ids=torch.ones(2, 5, dtype=torch.long, device=device), use_cache=True).past_key_values
            for variant in (model, fused)
        ]
    (stock_keys, stock_values), (keys, values) = ((cache.layers[0].keys, cache.layers[0].values) for cache in caches)
    assert (keys.dtype, values.dtype) == (stock_keys.dtype, stock_values.dtype)
    assert relative(values, stock_values) < 2e-2


def test_a_patched_model_is_saved_copied_and_switched_off_as_a_stock_one(device: str) -> None:
    model = model_of(device, target_modules=QV)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stock_results, _ = step(model, device)
    fused_norm.apply_fused_norm(model, strict=False)
    linear = model.get_base_model().layers[0].mlp.up_proj
    assert isinstance(linear, Linear4bit)
    for variant in (model, copy.deepcopy(model)):
        assert_same(variant.state_dict(), expected)
    assert_same(*(step(variant, device)[0] for variant in (model, copy.deepcopy(model))))
    with fused_norm.disabled():
        results, counts = step(model, device)
    assert not counts
    assert_same(results, stock_results)
    assert fused_norm.remove_fused_norm(model) > 0
    assert type(linear) is Linear4bit


def test_a_linear_that_is_not_quantised_yet_is_kept() -> None:
    model = nn.ModuleDict({"linear": Linear4bit(64, 64, compute_dtype=BF16), "norm": nn.RMSNorm(64)})
    report = fused_norm.apply_fused_norm(model, strict=False)
    (row,) = [row for row in report.kept if row.kind == "linear_4bit"]
    assert row.reason == "its weight is not quantised, or not frozen"


def test_adapters_that_come_after_the_patch_get_their_linear_back(device: str) -> None:
    model = model_of(device, target_modules=["v_proj"]).unload()
    assert fused_norm.apply_fused_norm(model, strict=False).counts["linear_4bit"] == 7
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=QV, init_lora_weights=False)).to(device)
    report = fused_norm.apply_fused_norm(adapted, strict=False)
    assert (report.counts["linear_4bit"], report.counts["lora"]) == (5, 2)
    assert type(adapted.base_model.model.layers[0].self_attn.q_proj.base_layer) is Linear4bit
    assert compare(adapted, device)["lora_linear_4bit"] == 2


def sharded_step(rank: int, ranks: int) -> dict[bool, tuple[list[Tensor], dict[str, int]]]:
    """Return the adapters' gradients of a step on this rank's tokens, and the operators that were called."""
    mesh, results = init_device_mesh("cpu", (ranks,)), {}
    for is_fused in (False, True):
        model = model_of("cpu", quant_storage=BF16, target_modules=QV)
        model.enable_input_require_grads()
        fused_norm.apply_fused_norm(model, strict=False, lora=is_fused)
        for module in (*model.get_base_model().layers, model):
            fully_shard(module, mesh=mesh)
        ids = torch.randint(0, 128, (1, 8), generator=torch.Generator().manual_seed(rank))
        with called_operators() as called, torch.autocast("cpu", BF16):
            model(input_ids=ids, use_cache=False).last_hidden_state.float().square().sum().backward()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        results[is_fused] = [parameter.grad.full_tensor() for parameter in trained], dict(Counter(called))
    return results


@pytest.mark.slow
def test_weights_that_fsdp_shards_are_read(tmp_path: Path) -> None:
    """FSDP gathers a parameter without the state of its quantisation, which the module keeps."""
    for results in on_two_ranks(sharded_step, tmp_path):
        (expected, _), (gradients, called) = results[False], results[True]
        assert (called["linear_4bit"], called["lora_linear_4bit"]) == (5, 2)
        assert_same(gradients, expected)
