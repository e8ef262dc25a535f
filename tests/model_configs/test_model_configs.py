"""The table matches the installed transformers: sizes, sites, semantics, and models that are reproducible."""

import copy
from dataclasses import asdict

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import fused_norm
from fused_norm.model_configs import FAMILIES, build, families_here, tiny_config
from fused_norm.spec import NormSpec

FAMILY_NAMES = families_here()


def specs_of(model):
    """Return the specs of a model's norms by path, according to the report."""
    sites = fused_norm.apply_fused_norm(copy.deepcopy(model)).fused
    return {site.path: site.spec for site in sites if site.kind in ("norm", "qk")}


def formula(spec: NormSpec, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    wide = x.float()
    x_hat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + spec.eps)
    if weight is None:
        return x_hat.to(x.dtype)
    gamma = 1.0 + weight.float() if spec.zero_centered else weight
    return gamma * x_hat.to(x.dtype) if spec.casting == "llama" else (gamma.float() * x_hat).to(x.dtype)


@pytest.mark.parametrize("model_type", FAMILY_NAMES)
def test_the_tiny_model_has_the_norms_and_layers_of_the_table(model_type):
    family = FAMILIES[model_type]
    model = build(model_type, seed=0)
    sites = family.sites()
    assert model.config.model_type == model_type
    layers = len(model.model.layers)
    assert layers == model.config.num_hidden_layers
    # Every one-dimensional parameter is a norm's weight, except biases, sinks and the decays of a delta net.
    specs = specs_of(model)
    others = ("bias", "sinks", "A_log")
    assert {n for n, parameter in model.named_parameters() if parameter.dim() == 1 and not n.endswith(others)} == {
        f"{path}.weight" for path, spec in specs.items() if spec.weighted
    }
    assert len(specs) == sites["norm"] + sites.get("qk", 0)
    if family.layer(0, model.config) is family.layer(layers - 1, model.config):
        assert sites["rope"] == layers
        assert sites.get("qk", 0) in (0, 2 * layers)
    modules = [module for layer in model.model.layers for module in layer.modules()]
    gated = [module for module in modules if hasattr(module, "down_proj") and "Experts" not in type(module).__name__]
    per_layer_inputs = [module for module in modules if hasattr(module, "per_layer_input_gate")]
    if not any(isinstance(module, torch.nn.ModuleList) for module in modules):  # of experts, in transformers 4
        assert sites.get("mlp", 0) == len(gated) + len(per_layer_inputs)


@pytest.mark.parametrize("model_type", FAMILY_NAMES)
def test_every_norm_of_the_tiny_model_computes_its_spec(model_type):
    model, generator = build(model_type, seed=0, dtype=torch.bfloat16), torch.Generator().manual_seed(0)
    for name, spec in specs_of(model).items():
        norm = model.get_submodule(name)
        weight = getattr(norm, "weight", None)
        assert spec.weighted == (weight is not None), name
        # Small enough for eps to matter.
        x = torch.randn(33, 24 if weight is None else weight.numel(), generator=generator).mul_(1e-2).bfloat16()
        expected = formula(spec, x, weight)
        if type(spec) is not NormSpec:  # one with a gate
            gate = torch.randn(x.shape, generator=generator).bfloat16()
            assert (spec.activation, spec.norm_before_gate, spec.groups) == ("silu", True, 1)
            assert torch.equal(norm(x, gate), (expected * torch.nn.functional.silu(gate.float())).to(x.dtype)), name
        else:
            assert torch.equal(norm(x), expected), name


@pytest.mark.parametrize("model_type", FAMILY_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tiny_model_trains_on_bytes(model_type, dtype):
    model = build(model_type, seed=0, dtype=dtype)
    tokens = torch.arange(2 * 40).view(2, 40) * 3 % 256
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert model.training
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype, name
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        if "norm" in name:
            assert parameter.grad.count_nonzero() > 0, name


def test_tiny_models_keep_what_is_special_about_their_family():
    names = ("llama", "mistral", "granite", "qwen3", "qwen3_moe", "gemma2")
    llama, mistral, granite, qwen3, moe, gemma2 = (build(name, seed=0) for name in names)
    for model in (llama, mistral, granite, qwen3, moe, gemma2):
        assert model.config.num_key_value_heads < model.config.num_attention_heads
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert tied == (model not in (llama, mistral, moe))
    assert mistral.config.sliding_window < 32
    assert {layer.residual_multiplier for layer in granite.model.layers} == {0.22}
    assert qwen3.config.head_dim * qwen3.config.num_attention_heads != qwen3.config.hidden_size
    assert [hasattr(layer.mlp, "experts") for layer in moe.model.layers] == [False, True]
    assert set(gemma2.config.layer_types) == {"sliding_attention", "full_attention"}
    assert gemma2.config.attn_logit_softcapping
    assert gemma2.config.final_logit_softcapping


@pytest.mark.parametrize("model_type", FAMILY_NAMES)
def test_the_same_seed_gives_the_same_weights_and_leaves_the_callers_generator_alone(model_type):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model, same, other_seed = build(model_type, seed=1), build(model_type, seed=1), build(model_type, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    for (name, a), b, c in zip(model.named_parameters(), same.parameters(), other_seed.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c) or name.endswith("bias"), name


def test_a_default_device_does_not_change_where_weights_are_drawn(device):
    expected = build("llama", seed=1)
    with torch.device("meta"):
        actual = build("llama", seed=1, device=device)
    for a, b in zip(expected.parameters(), actual.parameters(), strict=True):
        assert b.device.type == torch.device(device).type
        assert torch.equal(a, b.cpu())


@pytest.mark.parametrize("model_type", FAMILY_NAMES)
def test_norm_weights_and_biases_of_experts_move_by_norm_std_and_nothing_else_does(model_type):
    moved, initial = build(model_type, seed=3, norm_std=0.5), build(model_type, seed=3, norm_std=0.0)
    specs = {f"{path}.weight": spec for path, spec in specs_of(initial).items()}
    offsets = []
    for (name, a), b in zip(initial.named_parameters(), moved.parameters(), strict=True):
        if name in specs:
            start = 0.0 if specs[name].zero_centered else 1.0
            assert torch.equal(a, torch.full_like(a, start)), name
            offsets.append((b - a).detach())
        elif name.endswith(("experts.gate_up_proj_bias", "experts.down_proj_bias")):
            assert not a.any()
            assert b.std().item() == pytest.approx(0.5 / 3, rel=0.3)
        else:
            assert torch.equal(a, b), name
    assert torch.cat(offsets).std().item() == pytest.approx(0.5, rel=0.2)


def test_overrides_reach_the_config_and_not_the_table():
    before = {name: dict(family.tiny) for name, family in FAMILIES.items()}
    config = tiny_config("gemma3_text", num_hidden_layers=7, hidden_size=48)
    assert config.hidden_size == 48
    assert config.layer_types.count("full_attention") == 2
    tiny_config("qwen3_moe").mlp_only_layers.append(1)
    assert {name: dict(family.tiny) for name, family in FAMILIES.items()} == before


def test_an_unknown_type_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"no tiny model of type 'qwen4'; there are llama, mistral, granite, qwen3,"):
        tiny_config("qwen4")


PUBLISHED_PARAMETERS = {
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "google/gemma-2b": 2_506_172_416,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-3-1b-pt": 999_885_952,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
}


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_a_published_shape_has_the_published_number_of_parameters(name):
    model_type, shape = next((f.model_type, s) for f in FAMILIES.values() for s in f.shapes if s.name == name)
    sizes = asdict(shape)
    del sizes["name"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED_PARAMETERS[name]
