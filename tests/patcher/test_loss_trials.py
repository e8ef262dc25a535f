"""Rows of the loss say what the end of the model's forward does to the logits, and a log line what a call did."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from fused_norm import apply_fused_norm
from fused_norm.patcher.losses import LossCall
from fused_norm.patcher.patch_report import PatchReport, Site

from .models import tokens

SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}
SEQ2SEQ = {
    "vocab_size": 256,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": 0,
}
T5 = {
    "vocab_size": 256,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 1,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
BIASED = ("Bart", "MBart", "Marian:MTModel", "Pegasus", "LED", "PLBart", "Blenderbot", "Mvp")


class Passing(transformers.LlamaForCausalLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


class Meaning(transformers.LlamaForCausalLM):
    """Its loss is another one, of the same logits."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, **kwargs)
        output.loss = output.logits.mean()
        return output


def mobile_bert() -> PreTrainedModel:
    narrow = {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16}
    return transformers.MobileBertForMaskedLM(transformers.MobileBertConfig(**SIZES, **narrow))


def distil_bert() -> PreTrainedModel:
    config = transformers.DistilBertConfig(vocab_size=256, dim=32, n_layers=1, n_heads=4, hidden_dim=48)
    return transformers.DistilBertForMaskedLM(config)


def biased(name: str) -> PreTrainedModel:
    name, _, model = name.partition(":")
    config = getattr(transformers, f"{name}Config")(**SEQ2SEQ)
    return getattr(transformers, f"{name}{model or 'ForConditionalGeneration'}")(config)


def row_of(report: PatchReport) -> Site:
    """The row of the one head in it."""
    (row,) = (site for site in (*report.fused, *report.kept) if site.kind == "loss")
    return row


def row_and_calls(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture, **inputs: Any
) -> tuple[str, int, list[str]]:
    """The reason in the loss's row, the number of fused losses in a call, and what was logged in it."""
    report, calls, real = apply_fused_norm(model, strict=False), list[int](), LossCall._loss
    caplog.clear()
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, "fused_norm"):
        patch.setattr(LossCall, "_loss", lambda *args: (calls.append(1), real(*args))[1])
        ids = tokens(device=str(model.device))
        model(**{"input_ids": ids, "labels": ids, **inputs}).loss.backward()
    row = row_of(report)
    lines = [line for line in caplog.messages if any(word in line for word in ("label", "logits", "loss"))]
    return row.reason or "", len(calls), lines


@pytest.mark.parametrize("name", BIASED)
def test_a_bias_on_logits_is_a_reason_in_the_row(name: str) -> None:
    assert (
        row_of(apply_fused_norm(biased(name), strict=False)).reason
        == "its logits are read by add, before its loss or for another loss than a cross entropy"
    )


def test_a_head_that_is_not_called_is_a_reason(device: str, caplog: pytest.LogCaptureFixture) -> None:
    assert row_and_calls(mobile_bert().to(device), caplog) == ("its forward does not call its head", 0, [])


@pytest.mark.parametrize("build", [distil_bert, lambda: Passing(transformers.LlamaConfig(**SIZES))])
def test_a_loss_that_its_forward_does_not_name_is_fused(
    build: Any, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert row_and_calls(build().to(device), caplog) == ("", 1, [])


def test_another_loss_is_kept_with_what_reads_the_logits(device: str, caplog: pytest.LogCaptureFixture) -> None:
    reason, calls, lines = row_and_calls(Meaning(transformers.LlamaConfig(**SIZES)).to(device), caplog)
    assert (calls, lines) == (0, [])
    assert reason == "its logits are read by mean, before its loss or for another loss than a cross entropy"


def test_a_model_inside_a_model_logs_no_loss_as_stock_that_is_fused(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.Blip2Config(
        vision_config={**vision, "image_size": 16, "patch_size": 8},
        qformer_config={**SIZES, "encoder_hidden_size": 32},
        text_config={"model_type": "t5", **T5},
        num_query_tokens=4,
        image_token_index=96,
    )
    ids = tokens(device=device).clamp(max=90)
    ids[:, :4] = 96
    model, pixels = transformers.Blip2ForConditionalGeneration(config).to(device), torch.randn(len(ids), 3, 16, 16)
    assert row_and_calls(model, caplog, input_ids=ids, pixel_values=pixels.to(device)) == ("", 1, [])


def test_a_call_whose_loss_is_not_fused_is_logged_once(device: str, caplog: pytest.LogCaptureFixture) -> None:
    model = distil_bert().to(device)
    apply_fused_norm(model, strict=False)
    model.mlm_loss_fct = nn.Identity()  # as a trainer gives a model its own loss
    model.mlm_loss_fct.forward = lambda logits, labels: labels.float().mean()
    with caplog.at_level(logging.WARNING, "fused_norm"):
        for _ in range(2):
            model(input_ids=tokens(device=device), labels=tokens(device=device))
    lines = [line for line in caplog.messages if "loss" in line]
    assert lines == [
        "DistilBertForMaskedLM runs its stock code: its loss is no cross entropy of the logits of its head"
    ]
