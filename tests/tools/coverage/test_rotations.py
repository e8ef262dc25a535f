"""Rotations of attentions are recognised by the functions that they call, and these by their results."""

import pytest
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereAttention
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionAttention

from tools.coverage.rotations import layouts_of

LAYOUTS = {
    LlamaAttention: {"halves"},
    Qwen2_5_VLVisionAttention: {"halves"},
    CohereAttention: {"neighbours"},
    Llama4TextAttention: {"complex"},
    LlamaMLP: set(),
}


@pytest.mark.parametrize("cls", LAYOUTS, ids=lambda cls: cls.__name__)
def test_a_class_rotates_as_a_function_does_that_it_calls(cls):
    assert layouts_of(object.__new__(cls)) == LAYOUTS[cls]


@pytest.mark.parametrize(("interleave", "layout"), [(True, "neighbours"), (False, "halves")])
def test_a_setting_chooses_between_two_rotations(interleave, layout):
    attention = object.__new__(DeepseekV3Attention)
    nn.Module.__init__(attention)
    attention.config = DeepseekV3Config(rope_interleave=interleave)
    assert layouts_of(attention) == {layout}
