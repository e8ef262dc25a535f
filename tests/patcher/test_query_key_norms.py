"""The norms of q and k are computed together, and with the rotation, only where nobody reads them in between."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.exaone4.modeling_exaone4 import Exaone4Attention
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAttention
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeAttention
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from fused_norm.patcher.patterns import patterns_of, rotations_of
from fused_norm.patcher.patterns.calls import Rewrite
from fused_norm.patcher.patterns.heads import QK_NAME

from .forwards import Heads, Recorder, rotate, run

ROTATED = ["may postpone q_norm k_norm", "rotated"]
TOGETHER = ["may postpone q_norm k_norm", "pair"]


class Qwen3(Recorder):
    def forward(self, q, k, angles):
        q = self.q_norm(q.view(1)).transpose(1, 2)
        k = self.k_norm(k.view(1)).transpose(1, 2)
        value = self.flag
        cos, sin = angles
        q, k = rotate(q, k, cos, sin)
        return q, k, value


class Gemma3(Recorder):
    def forward(self, query, key, angles):
        query = self.q_norm(query)
        key = self.k_norm(key)
        cos, sin = angles
        query, key = rotate(query, key, cos, sin, unsqueeze_dim=2)
        return query, key


class KeyFirst(Recorder):
    def forward(self, q, k, angles):
        k = self.k_norm(k)
        q = self.q_norm(q)
        k, q = rotate(k, q, *angles, 1)
        return q, k


class Exaone4(Recorder):
    def forward(self, q, k, angles):
        q = self.q_norm(q)
        k = self.k_norm(k)
        cos, sin = angles
        if self.flag:
            q, k = rotate(q, k, cos, sin)
        return q, k


class Glm4Moe(Recorder):
    def forward(self, q, k, angles):
        if self.flag:
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = q.transpose(1, 2)
        cos, sin = angles
        q, k = rotate(q, k, cos, sin)
        return q, k


class HunYuan(Recorder):
    def forward(self, q, k, angles):
        cos, sin = angles
        q, k = rotate(q, k, cos, sin)
        q = self.query_layernorm(q)
        k = self.key_layernorm(k)
        return q, k


class RotatesAnother(Recorder):
    def forward(self, q, k, angles):
        q = self.q_norm(q)
        k = self.k_norm(k)
        p, k = rotate(q, k, angles[0], angles[1])
        return p, q, k


class RotatesSwapped(Recorder):
    def forward(self, q, k, angles):
        q = self.q_norm(q)
        k = self.k_norm(k)
        q, k = rotate(k, q, angles[0], angles[1])
        return q, k


class RotatesByThemselves(Recorder):
    def forward(self, q, k, angles):
        q = self.q_norm(q)
        k = self.k_norm(k)
        q, k = rotate(q, k, q.value, angles[1])
        return q, k


class RotatesDynamically(Recorder):
    def forward(self, q, k, angles):
        q = self.q_norm(q)
        k = self.k_norm(k)
        q, k = rotate(q, k, angles[0], angles[1], unsqueeze_dim=self.factor)
        return q, k


class RotatesStarred(Recorder):
    def forward(self, q, k, angles):
        q = self.q_norm(q)
        k = self.k_norm(k)
        q, k = rotate(q, k, *angles[:1], *angles[1:])
        return q, k


class RotatesOneByOne(Recorder):
    def forward(self, q, k, angles):
        q = self.q_norm(q)
        k = self.k_norm(k)
        q = rotate(q, q, *angles)[0]
        k = rotate(k, k, *angles)[0]
        return q, k


class WritesBeforeTheRotation(Recorder):
    def forward(self, q, k, angles):
        raw = q
        q = self.q_norm(q)
        k = self.k_norm(k)
        raw.mul_(2)
        q, k = rotate(q, k, angles[0], angles[1])
        raw.value = raw.value // 2
        return q, k


@pytest.mark.parametrize(
    ("attention", "rotation", "calls"),
    [
        (Qwen3, "rotate", ROTATED),
        (Gemma3, "rotate", ROTATED),
        (KeyFirst, None, ["may postpone k_norm q_norm", "pair"]),
        (Exaone4, None, TOGETHER),
        (Glm4Moe, None, TOGETHER),
        (HunYuan, None, TOGETHER),
        (RotatesAnother, None, TOGETHER),
        (RotatesSwapped, None, TOGETHER),
        (RotatesByThemselves, None, TOGETHER),
        (RotatesDynamically, None, TOGETHER),
        (RotatesStarred, None, TOGETHER),
        (RotatesOneByOne, None, TOGETHER),
        (WritesBeforeTheRotation, None, TOGETHER),
    ],
)
@pytest.mark.parametrize("may_postpone", [True, False])
def test_both_norms_become_one_call_and_every_value_stays(attention, rotation, calls, may_postpone: bool) -> None:
    (found,) = patterns_of(attention).heads
    assert found.rotate == rotation
    rewrites = (Rewrite("heads", 0, ("rotation",) if found.rotate else ()),)
    assert run(attention, Heads(2), Heads(3), (5, 7), rewrites=rewrites, may_postpone=may_postpone) == calls


def test_norms_can_be_made_together_without_the_rotation() -> None:
    assert run(Qwen3, Heads(2), Heads(3), (5, 7), rewrites=(Rewrite("heads", 0),)) == TOGETHER


class ReadsBetween(Recorder):
    def forward(self, q, k):
        q = self.q_norm(q)
        total = q.value
        k = self.k_norm(k)
        return q, k, total


class ReadsInTheSecond(Recorder):
    def forward(self, q, k):
        q = self.q_norm(q)
        k = self.k_norm(q)
        return q, k


class WritesBetween(Recorder):
    def forward(self, q, k):
        raw = q
        q = self.q_norm(q)
        raw.mul_(2)
        k = self.k_norm(k)
        raw.value = raw.value // 2
        return q, k


class OwnMethodWritesBetween(Recorder):
    """As an in-place dropout does."""

    def doubled(self, x):
        return x.mul_(2)

    def forward(self, q, k):
        q = Heads(q.value)
        normed = self.q_norm(q)
        k = self.k_norm(self.doubled(q))
        return normed, k


class ReadsInAFunction(Recorder):
    def forward(self, q, k):
        both = lambda: (q, k)  # noqa: E731
        q = self.q_norm(q)
        k = self.k_norm(k)
        return both()


class OnlyOne(Recorder):
    def forward(self, q, k):
        q = self.q_norm(q)
        k = self.other(k.value)
        return q, k


class Unpacked(Recorder):
    def forward(self, q, k):
        q, k = self.q_norm(q), self.k_norm(k)
        return q, k


class ElsewhereTransposed(Recorder):
    def transposed(self, x):
        return x

    def forward(self, q, k):
        q = self.transposed(self.q_norm(q))
        k = self.transposed(self.k_norm(k))
        return q, k


class InTwoBranches(Recorder):
    def forward(self, q, k):
        if self.flag:
            q = self.q_norm(q)
        else:
            k = self.k_norm(k)
        return q, k


class TransposesTheRows(Recorder):
    def forward(self, q, k):
        q = self.q_norm(q).transpose(2, 3)
        k = self.k_norm(k).transpose(2, 3)
        return q, k


class TransposesTheRowsByOneMore(Recorder):
    def forward(self, q, k):
        q = self.q_norm(q).transpose(1, 3)
        k = self.k_norm(k).transpose(1, 3)
        return q, k


class TransposesTheRowsOfK(Recorder):
    def forward(self, q, k):
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2, 3)
        return q, k


class TransposesByName(Recorder):
    def forward(self, q, k):
        q = self.q_norm(q).transpose(dim0=1, dim1=2)
        k = self.k_norm(k).transpose(dim0=1, dim1=2)
        return q, k


@pytest.mark.parametrize(
    "attention",
    [
        ReadsBetween,
        ReadsInTheSecond,
        WritesBetween,
        OwnMethodWritesBetween,
        ReadsInAFunction,
        OnlyOne,
        Unpacked,
        ElsewhereTransposed,
        InTwoBranches,
        TransposesTheRows,
        TransposesTheRowsByOneMore,
        TransposesTheRowsOfK,
        TransposesByName,
    ],
)
def test_what_only_resembles_a_pair_is_left_alone(attention) -> None:
    assert patterns_of(attention).heads == []
    assert run(attention, Heads(2), Heads(3)) == []


def half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def rotate_half(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def rotate_half_too(q, k, cos, sin, unsqueeze_dim=1):
    return rotate_half(q, k, cos, sin, unsqueeze_dim)


class TwoPairs(nn.Module):
    """An attention with two kinds of queries and keys, each with a rotation of its own."""

    def forward(self, q, k, p, m, cos, sin):
        q = self.q_norm(q)
        k = self.k_norm(k)
        q, k = rotate_half(q, k, cos, sin)
        p = self.query_norm(p)
        m = self.key_norm(m)
        p, m = rotate_half_too(p, m, cos, sin)
        return q, k, p, m


def test_each_pair_is_fused_with_its_own_rotation() -> None:
    assert [pair.rotate for pair in patterns_of(TwoPairs).heads] == ["rotate_half", "rotate_half_too"]

    def functions(*rewrites):
        return [rotation.function for rotation in rotations_of(TwoPairs, rewrites)]

    first, second = (Rewrite("heads", index, ("rotation",)) for index in range(2))
    assert functions(second) == [rotate_half_too]
    assert functions(Rewrite("heads", 0), second) == [rotate_half_too]
    assert functions(first, second) == [rotate_half, rotate_half_too]


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
    found = [(*one.names, one.rotate) for one in patterns_of(attention).heads]
    assert found == ([] if expected is None else [expected])


def test_names_of_q_and_k_norms() -> None:
    matching = ["q_norm", "k_norm", "qk_norm", "query_layernorm", "key_layer_norm", "qnorm", "k_layernorm"]
    assert [
        name for name in [*matching, "norm", "q_a_layernorm", "kv_norm", "q_norm_2"] if QK_NAME.fullmatch(name)
    ] == (matching)
