"""Models that take more than tokens: encoders with decoders, and towers of images and sound, are fused as stock."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nAudioEncoder

import fused_norm
from fused_norm.check.against_float64 import check_step

from .models import counts, relative, step

TOKENS = torch.randint(2, 64, (2, 16), generator=torch.Generator().manual_seed(1))

SITES = {
    # Two norms in a layer of the encoder, three in one of the decoder, one at the end of each. Sums are made at the
    # ends of modules that hold one norm each, and reach the next one's from outside.
    "t5": counts(norm=12, loss=1),
    # Two norms in a layer, one in front of all and one behind.
    "aimv2_vision_model": counts(norm=6, residual=2, mlp=2),
    # Nine norms in a layer; of those behind branches, one is added in a return, the others have a factor.
    "gemma3n_audio": counts(norm=18, sandwich=2),
}
IN_BF16 = tuple(SITES)
LAUNCHES = {
    "t5": {"rms_norm": 12, "linear_cross_entropy": 1},
    "aimv2_vision_model": {"rms_norm": 4, "add_rms_norm": 2, "glu": 2},
    "gemma3n_audio": {"rms_norm": 16, "norm_add": 2},
}


class Tower(nn.Module):
    """A tower with a head that says a token of each feature; what it takes is the same at every call."""

    def __init__(self, tower: nn.Module, name: str, given: Tensor, **others: Tensor) -> None:
        super().__init__()
        self.tower, self.head = tower, nn.Linear(64, 64)
        self.name, self.given, self.others = name, given, others

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> SimpleNamespace:
        given = self.given.bfloat16().to(input_ids.device, self.head.weight.dtype)
        others = {name: value.to(input_ids.device) for name, value in self.others.items()}
        logits = self.head(self.tower(**{self.name: given}, **others)[0])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return SimpleNamespace(logits=logits, loss=loss.to(logits.dtype))


def model_of(model_type: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    if model_type == "t5":
        sizes: dict[str, Any] = {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4}
        config = AutoConfig.for_model(model_type, **sizes, num_layers=2, decoder_start_token_id=0, dropout_rate=0.0)
        model: nn.Module = AutoModelForSeq2SeqLM.from_config(config)
    elif model_type == "aimv2_vision_model":
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = AutoConfig.for_model(model_type, **sizes, image_size=16, patch_size=4, use_head=False)
        model = Tower(AutoModel.from_config(config), "pixel_values", torch.randn(2, 3, 16, 16))
    else:
        sizes = {"hidden_size": 64, "input_feat_size": 32, "conf_num_attention_heads": 4, "conf_num_hidden_layers": 2}
        config = AutoConfig.for_model(model_type, **sizes, sscp_conv_channel_size=(16, 8), conf_reduction_factor=2)
        heard = {"audio_mel_mask": torch.zeros(2, 128, dtype=torch.bool)}
        model = Tower(Gemma3nAudioEncoder(config), "audio_mel", torch.randn(2, 128, 32), **heard)
    for module in model.modules():
        if "RMSNorm" in type(module).__name__ or "T5LayerNorm" in type(module).__name__:
            nn.init.normal_(module.weight, 1, 0.3)
    return model.to(dtype)


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=pytest.mark.slow if name == "gemma3n_audio" else ()) for name in SITES]
)
def test_sites_and_fp32_results(model_type: str, device: str, launches: list[str]) -> None:
    result = check_step(model_of(model_type).to(device), TOKENS.to(device), options={"strict": False})
    assert result.report.counts == SITES[model_type]
    assert {name: launches.count(name) for name in set(launches)} == LAUNCHES[model_type]
    assert result.ok, str(result)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", IN_BF16)
def test_bf16_errors_stay_within_the_stock_errors_budget(model_type: str, device: str) -> None:
    result = check_step(model_of(model_type, torch.bfloat16).to(device), TOKENS.to(device), options={"strict": False})
    assert result.ok, str(result)


@pytest.mark.parametrize("narrow", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
def test_of_a_wide_stream_t5s_norms_make_what_their_narrow_weights_are(narrow: torch.dtype, device: str) -> None:
    """``from_pretrained`` keeps one projection in fp32, and with it all sums after it."""
    stock = model_of("t5", narrow).to(device)
    for name, module in stock.named_modules():
        if name.endswith(".wo"):
            module.float()
    fused = copy.deepcopy(stock)
    fused_norm.apply_fused_norm(fused, strict=False)
    tokens, seen = TOKENS.to(device), []
    norm = fused.encoder.block[1].layer[1].layer_norm
    norm.register_forward_hook(lambda _, args, y: seen.append((args[0].dtype, y.dtype)))
    (expected, gradients), (logits, fused_gradients) = step(stock, tokens), step(fused, tokens)
    assert seen == [(torch.float32, narrow)]
    assert relative(logits, expected) < torch.finfo(narrow).eps
    worst = max(relative(fused_gradients[name], value) for name, value in gradients.items())
    assert worst < 8 * torch.finfo(narrow).eps
