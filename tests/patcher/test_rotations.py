"""A rotary embedding is fused by itself wherever it is called, and no value and no argument changes."""

from __future__ import annotations

import pytest
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.exaone4.modeling_exaone4 import Exaone4Attention
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAttention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.phi.modeling_phi import PhiAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from fused_norm.patcher.patterns import patterns_of, rewritten_forward
from fused_norm.patcher.patterns.calls import Rewrite
from fused_norm.patcher.patterns.rotations import ROTATION_NAME

from .forwards import Heads, Recorder, rotate, run


def rotate_one(x: Heads, cos: int, sin: int, unsqueeze_dim: int = 1) -> Heads:
    return Heads(x.value * cos + sin * unsqueeze_dim)


def embed(q: Heads, k: Heads, cos: int, sin: int) -> tuple[Heads, Heads]:
    return rotate(q, k, cos, sin)


def rotations_of(attention: type) -> list[tuple[str, int, int | None]]:
    """The function, its arguments and the q and k norms in front, of each rotation that is found in a forward."""
    return [(one.rotate, one.arguments, one.heads) for one in patterns_of(attention).rotations]


class Llama(Recorder):
    def forward(self, q, k, angles):
        q = q.view(1).transpose(1, 2)
        cos, sin = angles
        q, k = rotate(q, k, cos, sin)
        return q, k


class UnderAnIf(Recorder):
    def forward(self, q, k, angles):
        q = self.q_norm(q)
        k = self.k_norm(k)
        if self.flag:
            q, k = rotate(q, k, angles[0], angles[1], unsqueeze_dim=2)
        return q, k


class NormsAfter(Recorder):
    def forward(self, q, k, angles):
        q, k = rotate(q, k, angles[0], angles[1])
        q = self.query_layernorm(q)
        k = self.key_layernorm(k)
        return q, k


class PartsOfHeads(Recorder):
    def forward(self, q, k, angles):
        a, b = rotate(q.view(1), k.view(1), angles[0], angles[1], unsqueeze_dim=self.factor)
        return b, a


class OneByOne(Recorder):
    def forward(self, q, k, angles):
        cos, sin = angles
        q = rotate_one(q, cos, sin, unsqueeze_dim=2)
        q = q.transpose(1, 2)
        k = rotate_one(self.k_norm(k), cos, sin)
        return q, k


class AtPositions(Recorder):
    def forward(self, q, k, angles):
        q, k = rotate(q, k, angles[0], angles[1], self.factor)
        return q, k


class Otherwise(Recorder):
    def forward(self, q, k, angles):
        q, k = rotate(q, k, angles[0], sin=angles[1])
        q, k = rotate(q, k, *angles, 2)
        return rotate(q, k, angles[0], angles[1], 2, *())


class NoRotation(Recorder):
    def forward(self, q, k, angles):
        q, k = embed(q, k, angles[0], angles[1])
        return q, k


@pytest.mark.parametrize(
    ("attention", "rotations", "calls"),
    [
        (Llama, [("rotate", 4)], ["rope"]),
        (UnderAnIf, [("rotate", 4)], ["may postpone q_norm k_norm", "pair", "rope"]),
        (NormsAfter, [("rotate", 4)], ["rope", "may postpone q_norm k_norm", "pair"]),
        (PartsOfHeads, [("rotate", 4)], ["rope"]),
        (AtPositions, [("rotate", 5)], ["rope"]),
        (OneByOne, [("rotate_one", 3), ("rotate_one", 3)], ["rope one", "rope one"]),
        (Otherwise, [("rotate", 0)] * 3, []),
        (NoRotation, [], []),
    ],
)
def test_rotations_become_fused_calls_and_every_value_stays(attention, rotations, calls) -> None:
    assert [found[:2] for found in rotations_of(attention)] == rotations
    assert run(attention, Heads(2), Heads(3), (5, 7)) == calls


class Qwen3(Recorder):
    def forward(self, q, k, angles):
        q = self.q_norm(q)
        k = self.k_norm(k)
        q, k = embed(q, k, angles[0], angles[1])
        return q, k


def test_what_takes_the_results_of_a_pair_of_norms_is_a_rotation_under_any_name() -> None:
    assert rotations_of(Qwen3) == [("embed", 4, 0)]
    assert run(Qwen3, Heads(2), Heads(3), (5, 7)) == ["may postpone q_norm k_norm", "rotated"]
    assert run(Qwen3, Heads(2), Heads(3), (5, 7), rewrites=(Rewrite("rotations", 0),)) == ["rope"]


def test_the_function_is_looked_up_at_each_call(monkeypatch) -> None:
    forward = rewritten_forward(Llama, (Rewrite("rotations", 0),))
    monkeypatch.setitem(globals(), "rotate", lambda q, k, cos, sin: ("theirs", q, k))
    q, k = Heads(2), Heads(3)
    assert forward.__globals__ is globals()
    with pytest.raises(ValueError, match="too many values"):
        forward(Llama(), q, k, (5, 7))


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        (LlamaAttention, [("apply_rotary_pos_emb", 4, None)]),
        (PhiAttention, [("apply_rotary_pos_emb", 4, None)]),
        (Qwen3Attention, [("apply_rotary_pos_emb", 4, 0)]),
        (Exaone4Attention, [("apply_rotary_pos_emb", 4, None)]),
        (Gemma3nTextAttention, [("apply_rotary_pos_emb", 3, None)] * 2),
        (DeepseekV3Attention, [("apply_rotary_pos_emb_interleave", 4, None), ("apply_rotary_pos_emb", 4, None)]),
    ],
)
def test_what_attentions_of_transformers_have(attention, expected) -> None:
    assert rotations_of(attention) == expected


def test_names_of_rotations() -> None:
    names = ["apply_rotary_pos_emb", "rotate", "apply_rope", "RotaryEmbed", "apply_multimodal_rotary_pos_emb"]
    assert [name for name in [*names, "prototype", "europe", "scale"] if ROTATION_NAME.search(name)] == names
