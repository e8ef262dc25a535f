"""The norms of q and k are computed together, and with the rotation, only if nothing reads them in between."""

from __future__ import annotations

import textwrap

import pytest
from torch import nn
from transformers.models.exaone4.modeling_exaone4 import Exaone4Attention
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAttention
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeAttention
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from fused_norm.patcher.fused_block import Rewrite
from fused_norm.patcher.patterns import functions_of, patterns_of
from fused_norm.patcher.patterns.heads import QK_NAME

from .forwards import Heads, Recorder, assert_becomes, assert_unchanged, layer_of
from .rotary import rotates

NORMS = "q = self.q_norm(q); k = self.k_norm(k)"
TOGETHER = "q = q; k = k; q, k = self.fused_norm_pair(self.q_norm, self.k_norm, q, k)"
PAIRS = {
    "Qwen3": (
        """
        q = self.q_norm(q.view(1)).transpose(1, 2)
        k = self.k_norm(k.view(1)).transpose(1, 2)
        value = self.flag; cos, sin = angles; q, k = rotate(q, k, cos, sin)
        return q, k, value
        """,
        """
        q = q.view(1).transpose(1, 2); k = k.view(1).transpose(1, 2); value = self.flag; cos, sin = angles
        q, k = self.fused_norm_rotated(self.q_norm, self.k_norm, rotate, q, k, cos, sin)
        return q, k, value
        """,
    ),
    "Gemma 3": (
        f"{NORMS}; cos, sin = angles; q, k = rotate(q, k, cos, sin, unsqueeze_dim=2)",
        """
        q = q; k = k; cos, sin = angles
        q, k = self.fused_norm_rotated(self.q_norm, self.k_norm, rotate, q, k, cos, sin, unsqueeze_dim=2)
        """,
    ),
    "HunYuan": (
        """
        cos, sin = angles; q, k = rotate(q, k, cos, sin)
        q = self.query_layernorm(q); k = self.key_layernorm(k)
        """,
        """
        cos, sin = angles; q, k = rotate(q, k, cos, sin); q = q; k = k
        q, k = self.fused_norm_pair(self.query_layernorm, self.key_layernorm, q, k)
        """,
    ),
    "key first": (
        "k = self.k_norm(k); q = self.q_norm(q); k, q = rotate(k, q, *angles, 1)",
        """
        k = k; q = q; k, q = self.fused_norm_pair(self.k_norm, self.q_norm, k, q)
        k, q = rotate(k, q, *angles, 1)
        """,
    ),
}
# Exaone 4 and GLM 4 MoE are written so; the last case is of no model.
WITHOUT_THE_ROTATION = {
    "Exaone 4": """
        NORMS; cos, sin = angles
        if self.flag:
            q, k = rotate(q, k, cos, sin)
    """,
    "GLM 4 MoE": """
        if self.flag:
            NORMS
        q = q.transpose(1, 2); cos, sin = angles; q, k = rotate(q, k, cos, sin)
    """,
    "rotates another": "NORMS; p, k = rotate(q, k, angles[0], angles[1]); return p, q, k",
    "rotates swapped": "NORMS; q, k = rotate(k, q, angles[0], angles[1])",
    "rotates by themselves": "NORMS; q, k = rotate(q, k, q.value, angles[1])",
    "rotates dynamically": "NORMS; q, k = rotate(q, k, angles[0], angles[1], unsqueeze_dim=self.factor)",
    "rotates starred": "NORMS; q, k = rotate(q, k, *angles[:1], *angles[1:])",
    "rotates one by one": "NORMS; q = rotate(q, q, *angles)[0]; k = rotate(k, k, *angles)[0]",
    "writes before the rotation": """
        raw = q; NORMS; raw.mul_(2); q, k = rotate(q, k, angles[0], angles[1])
        raw.value = raw.value // 2
    """,
}
PAIRS |= {
    name: (body.replace("NORMS", NORMS), body.replace("NORMS", TOGETHER)) for name, body in WITHOUT_THE_ROTATION.items()
}
"""The body of an attention's forward, which returns q and k, before and after its norms are fused."""

ARGUMENTS = Heads(2), Heads(3), (5, 7)


def with_return(body: str) -> str:
    return body if "return" in body else textwrap.dedent(body) + "\nreturn q, k"


def attention_of(body: str, parameters: str = "q, k, angles", base: type = Recorder) -> type[Recorder]:
    return layer_of(with_return(body), parameters, base)


@pytest.mark.parametrize("name", PAIRS)
def test_both_norms_become_one_call_and_every_value_stays(name: str) -> None:
    before, after = PAIRS[name]
    attention = attention_of(before)
    (heads,) = patterns_of(attention).heads
    rewrites = (Rewrite("heads", 0, ("rotation",) if heads.rotate else ()),)
    assert_becomes(attention, with_return(after), ARGUMENTS, rewrites=rewrites)


def test_norms_can_be_made_together_without_the_rotation() -> None:
    rotate = "; cos, sin = angles; q, k = rotate(q, k, cos, sin); return q, k"
    assert_becomes(attention_of(NORMS + rotate), TOGETHER + rotate, ARGUMENTS, rewrites=(Rewrite("heads", 0),))


class WithMethods(Recorder):
    def transposed(self, x):
        return x

    def doubled(self, x):
        """As an in-place dropout does."""
        return x.mul_(2)


LEFT_ALONE = {
    "reads between": "q = self.q_norm(q); total = q.value; k = self.k_norm(k); return q, k, total",
    "reads in the second": "q = self.q_norm(q); k = self.k_norm(q)",
    "writes between": "raw = q; q = self.q_norm(q); raw.mul_(2); k = self.k_norm(k); raw.value = raw.value // 2",
    "an own method writes between": """
        q = Heads(q.value); normed = self.q_norm(q); k = self.k_norm(self.doubled(q))
        return normed, k
    """,
    "reads in a function": f"both = lambda: (q, k); {NORMS}; return both()",
    "only one": "q = self.q_norm(q); k = self.other(k.value)",
    "unpacked": "q, k = self.q_norm(q), self.k_norm(k)",
    "transposed elsewhere": "q = self.transposed(self.q_norm(q)); k = self.transposed(self.k_norm(k))",
    "in two branches": """
        if self.flag:
            q = self.q_norm(q)
        else:
            k = self.k_norm(k)
    """,
    "transposes the rows": "q = self.q_norm(q).transpose(2, 3); k = self.k_norm(k).transpose(2, 3)",
    "transposes the rows by one more": "q = self.q_norm(q).transpose(1, 3); k = self.k_norm(k).transpose(1, 3)",
    "transposes the rows of k": "q = self.q_norm(q).transpose(1, 2); k = self.k_norm(k).transpose(1, 2, 3)",
    "transposes by name": """
        q = self.q_norm(q).transpose(dim0=1, dim1=2)
        k = self.k_norm(k).transpose(dim0=1, dim1=2)
    """,
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_only_resembles_a_pair_is_left_alone(name: str) -> None:
    attention = attention_of(LEFT_ALONE[name], "q, k", WithMethods)
    assert patterns_of(attention).heads == []
    assert_unchanged(attention, (Heads(2), Heads(3)))


def rotates_too(q, k, cos, sin, unsqueeze_dim=1):
    return rotates(q, k, cos, sin, unsqueeze_dim)


class TwoPairs(nn.Module):
    """An attention with two kinds of queries and keys, each with a separate rotation."""

    def forward(self, q, k, p, m, cos, sin):
        q = self.q_norm(q)
        k = self.k_norm(k)
        q, k = rotates(q, k, cos, sin)
        p = self.query_norm(p)
        m = self.key_norm(m)
        p, m = rotates_too(p, m, cos, sin)
        return q, k, p, m


def test_each_pair_is_fused_with_its_own_rotation() -> None:
    assert [pair.rotate for pair in patterns_of(TwoPairs).heads] == ["rotates", "rotates_too"]

    def functions(*rewrites):
        return [rotation.function for rotation in functions_of(TwoPairs, rewrites)[0]]

    first, second = (Rewrite("heads", index, ("rotation",)) for index in range(2))
    assert functions(second) == [rotates_too]
    assert functions(Rewrite("heads", 0), second) == [rotates_too]
    assert functions(first, second) == [rotates, rotates_too]


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        (Qwen3Attention, ("q_norm", "k_norm", "apply_rotary_pos_emb")),
        (Gemma3Attention, ("q_norm", "k_norm", "apply_rotary_pos_emb")),
        (Qwen3NextAttention, ("q_norm", "k_norm", "apply_rotary_pos_emb")),
        (Exaone4Attention, ("q_norm", "k_norm", None)),
        (Glm4MoeAttention, ("q_norm", "k_norm", None)),
        (HunYuanDenseV1Attention, ("query_layernorm", "key_layernorm", None)),
        (Gemma3nTextAttention, None),
    ],
)
def test_what_attentions_of_transformers_have(attention, expected) -> None:
    heads = [(*pair.names, pair.rotate) for pair in patterns_of(attention).heads]
    assert heads == ([] if expected is None else [expected])


def test_names_of_q_and_k_norms() -> None:
    matching = ["q_norm", "k_norm", "qk_norm", "query_layernorm", "key_layer_norm", "qnorm", "k_layernorm"]
    assert [
        name for name in [*matching, "norm", "q_a_layernorm", "kv_norm", "q_norm_2"] if QK_NAME.fullmatch(name)
    ] == (matching)
