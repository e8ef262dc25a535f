"""Counts of model types match the stored summary, and sites that the patcher misses are counted separately."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import transformers

from fused_norm import apply_fused_norm
from tools.coverage import type_count
from tools.coverage.summary import Summary, summarise
from tools.coverage.type_count import count

from ...conftest import slow

STORED = Path(__file__).parents[3] / "benchmarks" / "coverage" / f"transformers-{transformers.__version__}.json"

SLOW = ("bamba", "cohere", "deepseek_v3", "gemma3_text", "gpt_oss", "lfm2", "llama4_text", "qwen3_next", "t5")


@pytest.fixture(scope="module")
def stored():
    if not STORED.exists():
        pytest.skip(f"there is no summary of transformers {transformers.__version__}")
    return Summary.load(STORED)


@pytest.mark.parametrize("model_type", ["llama", "bert", *slow(*SLOW)])
def test_a_type_has_what_the_stored_summary_says(model_type, stored):
    result = json.loads(json.dumps(asdict(count(model_type))))
    summary = summarise(stored.transformers, {model_type: result})
    assert summary.types.get(model_type) == stored.types.get(model_type)
    assert summary.classes == {name: stored.classes.get(name) for name in summary.classes}
    assert (model_type in stored.without) == (model_type in summary.without)


def test_what_the_patcher_has_no_row_for_is_counted_all_the_same(monkeypatch):
    def without_rows(model, **options):
        return replace(apply_fused_norm(model, **options), rows=())

    monkeypatch.setattr(type_count, "apply_fused_norm", without_rows)
    result = count("llama")
    assert (result.found["norm"], result.fused["norm"]) == (65, 0)
    assert (result.found["residual"], result.fused["residual"]) == (2, 0)
    assert ("norm", "llama.LlamaRMSNorm", "no row", 65) in result.kept
    assert ("residual", "llama.LlamaDecoderLayer post_attention_layernorm", "no row", 2) in result.kept


def test_a_row_on_an_add_that_is_not_made_is_told(monkeypatch):
    monkeypatch.setattr(type_count.TracedSums, "_is_sum_of", lambda *_: False)
    result = count("llama")
    assert result.found["residual"] == 0
    assert result.unfounded == [("residual", "llama.LlamaDecoderLayer", 2)]
