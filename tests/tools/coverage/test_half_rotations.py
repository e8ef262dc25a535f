"""Which attentions rotate by halves is told by the functions that they call, and these by their results."""

from __future__ import annotations

import pytest
from transformers.models.cohere.modeling_cohere import CohereAttention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLAttention, Qwen2_5_VLVisionAttention
from transformers.models.t5.modeling_t5 import T5Attention

from tools.coverage.half_rotations import rotates

HALVES = (LlamaAttention, Qwen2_5_VLAttention, Qwen2_5_VLVisionAttention, GptOssAttention)
OTHERS = (CohereAttention, T5Attention, LlamaMLP)  # the first one rotates neighbours


@pytest.mark.parametrize("cls", [*HALVES, *OTHERS], ids=lambda cls: cls.__name__)
def test_a_class_rotates_by_halves_where_a_function_that_it_calls_does(cls: type) -> None:
    assert rotates(object.__new__(cls)) == (cls in HALVES)
