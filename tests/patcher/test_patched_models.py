"""A patched model in use: the same outputs through every mechanism of transformers and PyTorch it meets."""

from __future__ import annotations

import copy
import logging
import threading
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fused_norm
from fused_norm.model_configs import FAMILIES, build, tiny_config

from .models import (
    SLOW_BUT_FOR_A_FEW,
    assert_gradients_near,
    assert_same_bits,
    assert_trains_as_stock,
    fused_copy,
    gradients_of,
    is_fused,
    logged,
    relative,
    sites,
    slow,
    step,
    tokens,
    twins,
)


@pytest.mark.parametrize("model_type", SLOW_BUT_FOR_A_FEW)
def test_a_forward_runs_every_site_fused(model_type: str, device: str, launches: list[str]) -> None:
    _, fused = twins(model_type, device)
    fused(tokens(device), use_cache=False)
    counts = sites(model_type)
    # A norm of a sum is computed with its add and with the norm of the branch; the layer's last add has a norm too.
    with_norm = counts["residual"] if counts["post_norm"] else 0
    assert launches.count("norm_add_norm") == with_norm
    assert launches.count("add_rms_norm") == counts["residual"] - with_norm
    assert launches.count("norm_add") == counts["post_norm"] - with_norm
    pairs = sum(site.kind == "rope" and site.spec is not None for site in fused_norm.apply_fused_norm(fused).fused)
    assert launches.count("qk_norm_rope") == pairs
    assert launches.count("rope") == counts["rope"] - pairs
    assert launches.count("glu") == counts["mlp"]
    alone = counts["norm"] - counts["residual"] - counts["post_norm"]
    assert launches.count("rms_norm") == alone + counts["qk"] - 2 * pairs
    assert launches.count("qk_norm") == 0


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [("qwen3", torch.float32), ("llama", torch.float32), ("gemma3_text", torch.bfloat16)],
)
def test_disabled_runs_stock_code_bit_for_bit_in_every_thread(
    model_type: str, dtype: torch.dtype, device: str, launches: list[str]
) -> None:
    stock, fused = twins(model_type, device, dtype=dtype)
    ids, results = tokens(device), []
    with fused_norm.disabled():
        with fused_norm.disabled():
            pass
        thread = threading.Thread(target=lambda: results.append(step(fused, ids)))
        thread.start()
        thread.join()
        results.append(step(fused, ids))
    assert launches == []
    for result in results:
        assert_same_bits(result, step(stock, ids))
    with pytest.raises(KeyError), fused_norm.disabled():
        raise KeyError
    fused(ids, use_cache=False)
    assert launches


@pytest.mark.parametrize("model_type", ["qwen3", slow("gemma3_text")])
def test_hidden_states_are_those_of_stock(model_type: str, device: str) -> None:
    stock, fused = twins(model_type, device)
    ids = tokens(device)
    expected = stock(ids, output_hidden_states=True, use_cache=False).hidden_states
    # Twice: transformers 4 leaves a bound forward on every layer when it records.
    for _ in range(2):
        actual = fused(ids, output_hidden_states=True, use_cache=False).hidden_states
        assert len(actual) == len(expected) == FAMILIES[model_type].tiny["num_hidden_layers"] + 1
        assert all(relative(mine, theirs) < 1e-5 for mine, theirs in zip(actual, expected, strict=True))
    recorded = copy.deepcopy(stock)
    assert fused_norm.apply_fused_norm(recorded).counts == sites(model_type)
    assert_trains_as_stock(stock, recorded, ids)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3", slow("gemma3_text")])
def test_gradient_checkpointing_still_recomputes(
    model_type: str, reentrant: bool, device: str, launches: list[str]
) -> None:
    stock, fused = twins(model_type, device)
    fused.gradient_checkpointing_enable({"use_reentrant": reentrant})
    fused.train()
    if reentrant:
        fused.enable_input_require_grads()
    counts = []
    fused.model.layers[0].mlp.register_forward_pre_hook(lambda *_: counts.append(1))
    assert_trains_as_stock(stock, fused, tokens(device))
    assert len(counts) == 2
    assert launches.count("qk_norm_rope") == 2 * sites(model_type)["rope"]


@pytest.mark.parametrize(
    ("model_type", "cache"),
    [
        ("llama", "static"),
        ("gemma2", "static"),
        ("gemma3_text", None),
        *(slow(name, "static") for name in ("qwen3_moe", "gemma3_text")),
    ],
)
def test_generation_gives_the_stock_tokens(model_type: str, cache: str | None, device: str) -> None:
    stock, fused = twins(model_type, device)
    ids = tokens(device, length=5)
    # Compiling is tested below; generate would do it here on a GPU.
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    expected = stock.eval().generate(ids, cache_implementation=cache, **options)
    assert torch.equal(fused.eval().generate(ids, cache_implementation=cache, **options), expected)


COMPILED = [
    slow("llama", True, "eager"),
    *(slow(name, True, "aot_eager") for name in ("gemma2", "gemma3_text")),
    # Lengths become dynamic at the second length.
    slow("llama", None, "aot_eager"),
    slow("qwen3", True, "inductor"),
]


@pytest.mark.usefixtures("large_graphs")
@pytest.mark.parametrize(("model_type", "dynamic", "backend"), COMPILED)
def test_a_model_compiled_for_any_length_trains_as_it_does_uncompiled(
    model_type: str, dynamic: bool | None, backend: str, device: str
) -> None:
    torch._dynamo.utils.counters.clear()
    _, fused = twins(model_type, device)
    compiled = torch.compile(fused, dynamic=dynamic, backend=backend, fullgraph=True)
    for length in (19, 23, 30):
        assert_trains_as_stock(fused, compiled, tokens(device, length=length))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (1 if dynamic else 2)


def functions_in_graphs(model: nn.Module, ids: torch.Tensor) -> Counter[str]:
    """Return the calls in the graphs of a compiled model and in their subgraphs, as of a differentiated operator."""
    called: Counter[str] = Counter()

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        called.update(str(node.target) for part in graphs for node in part.graph.nodes if node.op.startswith("call"))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(ids, use_cache=False)
    return called


@pytest.mark.usefixtures("large_graphs")
@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("qwen3", {"rms_norm": 2, "add_rms_norm": 1, "qk_norm": 1, "glu": 1}),
        pytest.param(
            "gemma2", {"rms_norm": 2, "norm_add_norm": 1, "norm_add": 1, "rope": 1, "glu": 1}, marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.parametrize("trained", [True, False])
def test_compiled_code_calls_the_operators(
    model_type: str, expected: dict[str, int], trained: bool, device: str
) -> None:
    """Equal numbers do not show it: if something in the way is misread, compiled code is stock's."""
    _, fused = twins(tiny_config(model_type, num_hidden_layers=1), device)
    with torch.set_grad_enabled(trained):
        called = functions_in_graphs(fused, tokens(device))
    assert {name: called[f"fused_norm.{name}_forward.default"] for name in expected} == expected


@pytest.mark.parametrize("model_type", ["qwen3", slow("gemma2")])
def test_what_is_left_to_the_compiler_is_the_stock_forward(model_type: str, device: str) -> None:
    models = twins(tiny_config(model_type, num_hidden_layers=1), device)
    with torch.no_grad():
        stock, fused = (functions_in_graphs(model, tokens(device)) for model in models)
    assert fused == stock
    assert stock.total() > 20


@pytest.mark.usefixtures("large_graphs")
def test_compiled_code_notices_the_switch(device: str) -> None:
    stock, fused = twins(tiny_config("llama", num_hidden_layers=1), device)
    ids = tokens(device)
    compiled = torch.compile(fused, backend="eager", fullgraph=True)
    with torch.no_grad():
        compiled(ids, use_cache=False)
        with fused_norm.disabled():
            inside = compiled(ids, use_cache=False).logits
        torch.testing.assert_close(inside, stock(ids, use_cache=False).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])
def test_autocast_sees_the_dtypes_of_stock(model_type: str, device: str) -> None:
    stock, fused = twins(model_type, device)
    ids = tokens(device)
    seen: dict[str, list] = {"stock": [], "fused": []}
    for name, model in (("stock", stock), ("fused", fused)):
        for module in (model.model.layers[0].mlp, model.lm_head):
            module.register_forward_pre_hook(lambda _, args, name=name: seen[name].append(args[0].dtype))
        with torch.autocast(device, dtype=torch.bfloat16):
            output = model(ids, labels=ids, use_cache=False)
        output.loss.backward()
        seen[name].append(output.logits.detach())
    assert seen["stock"][:2] == seen["fused"][:2]
    assert relative(seen["fused"][2], seen["stock"][2]) < 2**-7
    assert_gradients_near(gradients_of(fused), gradients_of(stock), 2**-5)


def test_fp32_norm_weights_in_a_16_bit_model_keep_the_stock_dtypes(device: str, launches: list[str]) -> None:
    stock = build("llama", seed=0, dtype=torch.bfloat16, device=device)
    stock.model.norm.float()
    fused = fused_copy(stock)
    x = torch.randn(3, 72, device=device, dtype=torch.bfloat16)
    assert fused.model.norm(x).dtype == stock.model.norm(x).dtype == torch.float32
    assert relative(fused.model.norm(x), stock.model.norm(x)) < 1e-6
    assert launches == ["rms_norm", "rms_norm"]


def test_calls_that_kernels_cannot_take_run_stock_code_and_say_so(device: str, caplog, launches: list[str]) -> None:
    stock = build("llama", seed=0, device=device)

    class NewRMSNorm(type(stock.model.norm)):
        """A class that nothing has been logged of."""

    for module in (stock.model.norm, stock.model.layers[0].post_attention_layernorm):
        module.__class__ = NewRMSNorm
    fused = fused_copy(stock)
    norm, reference = fused.model.norm, stock.model.norm
    add_norm = fused.model.layers[0].post_attention_layernorm
    x = torch.randn(2, 4, 72, device=device)
    with caplog.at_level(logging.WARNING, logger="fused_norm"):
        for _ in range(2):
            assert torch.equal(norm.double()(x.double()), reference.double()(x.double()))
        norm.float(), reference.float()
        one_row = torch.randn(72, device=device)
        y, total = add_norm(x, one_row)  # stock broadcasts a residual
        assert torch.equal(total, one_row + x)
        assert relative(y, stock.model.layers[0].post_attention_layernorm(total)) < 1e-6
        with pytest.raises(RuntimeError, match="must match the size"):
            norm(torch.randn(2, 5, device=device))
    assert launches == ["rms_norm"]
    assert logged(caplog) == [
        "NewRMSNorm runs its stock code: x is torch.float64",
        "NewRMSNorm runs PyTorch's add: residual must have x's shape (2, 4, 72), not (72,); expand it first",
        "NewRMSNorm runs its stock code: weight must have shape (5,), the last dimension of x, not (72,)",
    ]
    assert torch.equal(norm(hidden_states=x), norm(x))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_spread_as_in_stock(value: float, device: str) -> None:
    embeds = torch.randn(2, 6, 72, device=device)
    embeds[1, 2, 3] = value
    expected, actual = (model(inputs_embeds=embeds, use_cache=False).logits for model in twins("gemma2", device))
    assert torch.equal(actual.isnan(), expected.isnan())
    assert actual[1].isnan().any()
    assert not actual[0].isnan().any()


@pytest.mark.usefixtures("large_graphs")
def test_export_leaves_no_operator_of_ours_behind(device: str) -> None:
    stock, fused = twins("llama", device)
    x = torch.randn(2, 4, 72, device=device)
    program = torch.export.export(fused.model.norm, (x,))
    assert "fused_norm" not in str(program.graph)
    assert relative(program.module()(x), stock.model.norm(x)) < 1e-6


def test_uncast_norms_run_stock_under_autocast(device: str, launches: list[str]) -> None:
    class UncastRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.randn(24)), 1e-5

        def forward(self, x):
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))

    stock = UncastRMSNorm().to(device, torch.bfloat16)
    fused = copy.deepcopy(stock)
    assert fused_norm.apply_fused_norm(fused).fused[0].spec.casting == "none"
    assert is_fused(fused)
    x = torch.randn(4, 24, device=device, dtype=torch.bfloat16)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(fused(x), stock(x))
    assert launches == []
    assert relative(fused(x), stock(x)) < 2**-8
    assert launches == ["rms_norm"]


def test_an_eps_and_a_weight_changed_later_are_honoured(device: str) -> None:
    stock, fused = twins("llama", device)
    x = torch.randn(2, 4, 72, device=device)
    stock.model.norm.variance_epsilon = fused.model.norm.variance_epsilon = 0.5
    assert relative(fused.model.norm(x), stock.model.norm(x)) < 1e-6
    for model in (stock, fused):
        model.model.norm.weight = nn.Parameter(torch.linspace(-2, 2, 72, device=device))
    assert relative(fused.model.norm(x), stock.model.norm(x)) < 1e-6
