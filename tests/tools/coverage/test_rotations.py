"""Which attentions rotate by halves is told by the functions that they call, and these by their results."""

from __future__ import annotations

import pytest
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereAttention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, apply_rotary_pos_emb
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLAttention, Qwen2_5_VLVisionAttention
from transformers.models.t5.modeling_t5 import T5Attention

from tools.coverage.half_rotations import rotates

HALVES = (LlamaAttention, Qwen2_5_VLAttention, Qwen2_5_VLVisionAttention, GptOssAttention)
OTHERS = (CohereAttention, T5Attention, LlamaMLP)  # the first one rotates neighbours


@pytest.mark.parametrize("cls", [*HALVES, *OTHERS], ids=lambda cls: cls.__name__)
def test_a_class_rotates_by_halves_where_a_function_that_it_calls_does(cls: type) -> None:
    assert rotates(object.__new__(cls)) == (cls in HALVES)


class Choosing(nn.Module):
    """An attention that rotates in a method, if its settings say so; it is called with tensors of any kind."""

    def __init__(self, mode: str, layers: list[int]) -> None:
        super().__init__()
        self.mode, self.layers, self.number = mode, layers, 3

    @property
    def broken(self) -> bool:
        raise RuntimeError

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if self.number in self.layers and q.shape == k.shape:
            return q, k
        if self.mode == "at once":
            return apply_rotary_pos_emb(q, k, cos, sin)
        return (q, k) if self.number not in self.layers else self._turned(q, k, cos, sin)

    def _turned(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        turned = q, k
        if not self.mode.startswith("by"):
            if self.mode == "unknown" and self.broken:
                turned = apply_rotary_pos_emb(q, k, cos, sin)
        elif len(cos) > 1:
            turned = apply_rotary_pos_emb(q, k, cos, sin)
        return turned


@pytest.mark.parametrize(
    ("mode", "layers", "expected"),
    [
        ("at once", [], True),
        ("by methods", [3], True),
        ("by methods", [2], False),
        ("unknown", [3], True),
        ("never", [3], False),
        ("never", [], False),
    ],
)
def test_a_rotation_that_settings_never_reach_does_not_count(mode: str, layers: list[int], expected: bool) -> None:
    assert rotates(Choosing(mode, layers)) == expected
