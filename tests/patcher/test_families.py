"""Models of families that are not in the table: the sites that are fused in each, and stock's results."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import fused_norm
from fused_norm.check.against_float64 import check_step

from .models import EXPERTS_ARE_MLPS, fused_copy, is_fused, relative, slow, slow_but, step
from .other_families import OTHERS, TOKENS, TOKENS_OF_TOWERS, model_of

QUICK = ("glm4", "olmo2", "exaone4", "granite", "phi3", "lfm2", "qwen3_next", "t5", "aimv2_vision_model", "qwen2_5_vl")
OPERATORS = {
    "residual": ("add_rms_norm", "norm_add_norm"),
    "post_norm": ("norm_add", "norm_add_norm"),
    "rope": ("rope", "qk_norm_rope"),
    "experts": ("expert_gate",),
    "loss": ("linear_cross_entropy",),
}
"""The operators one of which runs once for each site of a kind."""
QUICK_IN_BF16 = ("glm4", "granite", "olmo2")


@pytest.mark.parametrize("model_type", slow_but(QUICK, [*OTHERS]))
def test_sites_and_fp32_results(model_type: str, device: str, launches: list[str]) -> None:
    family = OTHERS[model_type]
    if EXPERTS_ARE_MLPS and family.only_in_5:
        pytest.skip("transformers 4 writes this attention, or these norms, in a way that is kept")
    model, ids = model_of(model_type, device), family.tokens.to(device)
    result = check_step(model, ids, options={"strict": False})
    sites, ran = dict(family.sites), Counter(launches)
    assert ran["glu"] >= sites.get("mlp", 0)
    if EXPERTS_ARE_MLPS:
        changed = {"experts": 0, "mlp": sites.get("mlp", 0) + family.expert_mlps}
        sites |= {kind: changed[kind] for kind in changed if kind in sites}
    assert {kind: result.report.counts[kind] for kind in sites} == sites
    for kind, operators in OPERATORS.items():
        if kind in sites and (model_type, kind) != ("zamba2", "residual"):  # most of its layers have nothing to add
            assert sum(ran[name] for name in operators) == sites[kind], kind
    assert result.ok, str(result)
    if family.tokens is TOKENS:  # a decoder without labels
        model.eval()
        with torch.no_grad():
            stock = model(ids, use_cache=False).logits
            fused_norm.apply_fused_norm(model)
            assert relative(model(ids, use_cache=False).logits, stock) < 2e-6


@pytest.mark.parametrize("model_type", slow_but(QUICK_IN_BF16, [name for name in OTHERS if OTHERS[name].in_bf16]))
def test_bf16_errors_stay_within_the_stock_errors_budget(model_type: str, device: str) -> None:
    ids = OTHERS[model_type].tokens
    ids = ids.repeat(1, 3) if ids is TOKENS else ids
    result = check_step(model_of(model_type, device, torch.bfloat16), ids.to(device), options={"strict": False})
    assert result.ok, str(result)


def test_a_scale_that_is_a_tensor_is_multiplied_as_in_stock(device: str) -> None:
    stock, ids = model_of("granite", device), TOKENS.to(device)
    fused = fused_copy(stock)
    for model in (stock, fused):
        model.model.layers[0].residual_multiplier = torch.nn.Parameter(torch.tensor(0.3, device=device))
        model.model.layers[1].residual_multiplier = 1
        model(ids, labels=ids, use_cache=False).loss.backward()
    pairs = list(zip(fused.parameters(), stock.parameters(), strict=True))
    assert all(relative(mine.grad, theirs.grad) < 1e-5 for mine, theirs in pairs)
    assert fused.model.layers[0].residual_multiplier.grad != 0


def test_of_an_attention_whose_q_and_k_norms_differ_in_width_the_rotation_is_fused_alone() -> None:
    model = model_of("olmo2")
    report = fused_norm.apply_fused_norm(model)
    assert is_fused(model.model.layers[0])
    assert {site.spec for site in report.fused if site.kind == "rope"} == {None}
    rows = [site for site in (*report.fused, *report.kept) if site.kind == "residual"]
    assert not rows, "no norm of a layer takes a sum"


@pytest.mark.parametrize("narrow", [torch.bfloat16, slow(torch.float16)], ids=str)
def test_of_a_wide_stream_t5s_norms_make_what_their_narrow_weights_are(narrow: torch.dtype, device: str) -> None:
    """``from_pretrained`` keeps a projection in fp32, and with it all sums after it."""
    stock = model_of("t5", device, narrow)
    for name, module in stock.named_modules():
        if name.endswith(".wo"):
            module.float()
    fused = fused_copy(stock, strict=False)
    ids, dtypes = TOKENS_OF_TOWERS.to(device), []
    norm = fused.encoder.block[1].layer[1].layer_norm
    norm.register_forward_hook(lambda _, args, y: dtypes.append((args[0].dtype, y.dtype)))
    (expected, gradients), (logits, fused_gradients) = step(stock, ids), step(fused, ids)
    assert dtypes == [(torch.float32, narrow)]
    assert relative(logits, expected) < torch.finfo(narrow).eps
    worst = max(relative(fused_gradients[name], value) for name, value in gradients.items())
    assert worst < 8 * torch.finfo(narrow).eps
