"""A rotation is recognised by its results and their dtypes, and nothing else is recognised as a rotation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.blt.modeling_blt import apply_rotary_pos_emb as interleaved
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as interleaved_in_fp32
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave as deinterleaved
from transformers.models.ernie4_5.modeling_ernie4_5 import apply_rotary_pos_emb as by_pair_in_fp32
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as first_by_pair
from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb as partial
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as halved
from transformers.models.helium.modeling_helium import apply_rotary_pos_emb as by_pair
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as full
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as rounding
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision as vision
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb as full_of_qwen3

from fused_norm.patcher.probe import UnrecognisedError
from fused_norm.patcher.rotation_recognition import (
    full_cos_sin,
    half_cos_sin,
    indexed_cos_sin,
    mrope_cos_sin,
    recognise_rotation,
)

from .models import EXPERTS_ARE_MLPS
from .rotary import (
    half,
    last_of_a_head,
    of_a_table,
    of_pairs,
    of_sections,
    rotates,
    turns_views,
    with_positions,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def fp32_inside(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim).float(), sin.unsqueeze(unsqueeze_dim).float()
    return tuple((x.float() * cos + half(x.float()) * sin).to(x.dtype) for x in (q, k))


def fp64_inside(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim).double(), sin.unsqueeze(unsqueeze_dim).double()
    return tuple((x.double() * cos + half(x.double()) * sin).to(x.dtype) for x in (q, k))


EACH_STEP = frozenset(
    {(FP32, FP32), (BF16, BF16), (FP16, FP16), (BF16, FP32), (FP16, FP32), (FP32, BF16), (FP32, FP16)}
)
WIDE_ANGLES, WIDE_HEADS = (
    frozenset({(BF16, FP32), (FP16, FP32)}),
    frozenset({(FP32, dtype) for dtype in (FP32, BF16, FP16)}),
)
KNOWN = [
    (full, {}, EACH_STEP),
    (full_of_qwen3, {}, EACH_STEP),
    (partial, {"partial": True}, EACH_STEP),
    (halved, {"angles": half_cos_sin}, EACH_STEP),
    (rounding, {}, EACH_STEP - WIDE_ANGLES),  # a cast that does something only there
    (fp32_inside, {}, WIDE_HEADS),
    (vision, {"tokens_first": True}, WIDE_HEADS),
    (interleaved, {"layout": "interleaved"}, EACH_STEP),
    (interleaved_in_fp32, {"layout": "interleaved"}, WIDE_HEADS),
    (by_pair, {"layout": "interleaved", "angles_by_pair": True}, EACH_STEP),
    (by_pair_in_fp32, {"layout": "interleaved", "angles_by_pair": True}, WIDE_HEADS),
    (first_by_pair, {"layout": "interleaved", "angles_by_pair": True, "partial": True}, EACH_STEP),
    (of_pairs, {"layout": "interleaved", "angles_by_pair": True, "angles": half_cos_sin}, EACH_STEP),
    (deinterleaved, {"layout": "deinterleaved", "angles_by_pair": not EXPERTS_ARE_MLPS}, EACH_STEP),
    (turns_views, {"layout": "deinterleaved"}, EACH_STEP),
]
"""Functions, how they differ from Llama's, and the dtypes in which they round each step; in others they round once."""
LLAMAS = {
    "angles": full_cos_sin, "layout": "half", "angles_by_pair": False, "partial": False, "tokens_first": False,
}  # fmt: skip


@pytest.mark.parametrize(("function", "differs", "dtypes"), KNOWN)
def test_a_rotation_is_known_with_its_layout_its_angles_and_its_rounding(function, differs, dtypes) -> None:
    rotation = recognise_rotation(function)
    assert rotation.function is function
    assert {name: getattr(rotation, name) for name in LLAMAS} == LLAMAS | differs
    assert (set(rotation.dtypes), set(rotation.single_rounding_dtypes)) == (dtypes, EACH_STEP - dtypes)
    assert rotation.fits_qk_norm == (differs in ({}, {"partial": True}))


@pytest.mark.parametrize(
    ("function", "angles"),
    [(of_a_table, indexed_cos_sin), (of_sections, mrope_cos_sin), (with_positions, full_cos_sin)],
)
def test_what_comes_after_sin_may_tell_the_angles(function, angles) -> None:
    rotation = recognise_rotation(function, 5)
    assert rotation.angles is angles
    assert rotation.arguments == 5
    assert rotation.partial == (function is of_sections)
    assert rotation.dtypes == recognise_rotation(full).dtypes


OF_OTHER_ANGLES = {
    "other sections": lambda q, k, cos, sin, sections, unsqueeze_dim=1: of_sections(
        q, k, cos, sin, sections, unsqueeze_dim, order=(1, 0, 2)
    ),
    "as many as the first": lambda q, k, cos, sin, sections, unsqueeze_dim=1: of_sections(
        q, k, cos, sin, [sections[0], 1, cos.shape[-1] // 2 - sections[0] - 1], unsqueeze_dim
    ),
    "as many as the last": lambda q, k, cos, sin, sections, unsqueeze_dim=1: of_sections(
        q, k, cos, sin, [1, cos.shape[-1] // 2 - sections[2] - 1, sections[2]], unsqueeze_dim
    ),
    "the next positions": lambda q, k, cos, sin, positions, unsqueeze_dim=1: rotates(
        q, k, cos.roll(-1, 0)[positions], sin.roll(-1, 0)[positions], unsqueeze_dim
    ),
    "sin at its place": lambda q, k, cos, sin, positions, unsqueeze_dim=1: rotates(
        q, k, cos[positions], sin[: q.shape[-2]].expand(2, -1, -1), unsqueeze_dim
    ),
}


@pytest.mark.parametrize("name", OF_OTHER_ANGLES)
def test_other_angles_are_refused(name: str) -> None:
    with pytest.raises(UnrecognisedError, match="does not compute a rotation of pairs of q and k"):
        recognise_rotation(OF_OTHER_ANGLES[name], 5)


@torch.no_grad()
def without_gradients(q, k, cos, sin, unsqueeze_dim=1):
    return full(q, k, cos, sin, unsqueeze_dim)


OTHERS = {
    "its last elements": last_of_a_head,
    "neighbours of pairs": lambda q, k, cos, sin, unsqueeze_dim=1: tuple(
        x.roll(1, -1) for x in interleaved(q.roll(-1, -1), k.roll(-1, -1), cos, sin, unsqueeze_dim)
    ),
    "neighbours backwards": lambda q, k, cos, sin, unsqueeze_dim=1: by_pair(q, k, cos, -sin, unsqueeze_dim),
    "neighbours by the angles of the next pair": lambda q, k, cos, sin, unsqueeze_dim=1: by_pair(
        q, k, cos.roll(1, -1), sin.roll(1, -1), unsqueeze_dim
    ),
    "neighbours by angles by turns": lambda q, k, cos, sin, unsqueeze_dim=1: interleaved(
        q, k, cos.repeat(1, 1, 2)[..., ::2], sin.repeat(1, 1, 2)[..., ::2], unsqueeze_dim
    ),
    "halves that become neighbours": lambda q, k, cos, sin, unsqueeze_dim=1: tuple(
        x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for x in full(q, k, cos, sin, unsqueeze_dim)
    ),
    "backwards": lambda q, k, cos, sin, unsqueeze_dim=1: full(q, k, cos, -sin, unsqueeze_dim=unsqueeze_dim),
    "q alone": lambda q, k, cos, sin, unsqueeze_dim=1: (full(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)[0], k),
    "deaf": lambda q, k, cos, sin, unsqueeze_dim=1: full(q, k, cos, sin),
    "a list": lambda q, k, cos, sin, unsqueeze_dim=1: list(full(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)),
    "with positions": with_positions,
    "in fp64": fp64_inside,
    "k detached": lambda q, k, cos, sin, unsqueeze_dim=1: full(q, k.detach(), cos, sin, unsqueeze_dim=unsqueeze_dim),
    "without gradients": without_gradients,
    "others for a batch of one": lambda q, k, cos, sin, unsqueeze_dim=1: full(
        q, k, cos, sin if cos.shape[0] > 1 else -sin, unsqueeze_dim=unsqueeze_dim
    ),
    "a tower that is deaf to a batch": lambda q, k, cos, sin: (
        vision(q, k, cos[0], sin[0]) if cos.dim() == 3 else vision(q, k, cos, sin)
    ),
    "a tower with other angles without a batch": lambda q, k, cos, sin: vision(
        q, k, cos, -sin if q.dim() > cos.dim() + 1 else sin
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_are_refused(name: str) -> None:
    with pytest.raises(UnrecognisedError, match="does not compute a rotation of pairs"):
        recognise_rotation(OTHERS[name])


class AsModule(nn.Module):
    """Return the module that the package ``kernels`` turns a function into."""

    def forward(self, *args, **named):
        return rotates(*args, **named)


def test_a_module_that_rotates_is_known_while_its_call_is_its_own_forward() -> None:
    module = AsModule()
    rotation = recognise_rotation(module)
    assert rotation.dtypes == recognise_rotation(rotates).dtypes
    assert rotation.is_now(module)
    module.forward = AsModule.forward.__get__(module)  # `kernelize` leaves this if it has no kernel
    assert rotation.is_now(module)
    assert not rotation.is_now(AsModule())
    module.forward = lambda q, k, cos, sin: (q, k)
    assert not rotation.is_now(module)
    with pytest.raises(UnrecognisedError, match="not a function"):
        recognise_rotation(module)
    del module.forward
    seen = []
    module.register_forward_hook(lambda *_: seen.append("a call"))
    assert not rotation.is_now(module)
    assert recognise_rotation(module).dtypes == rotation.dtypes
    assert seen == []


@pytest.mark.parametrize(
    "value", [None, nn.Linear(2, 2), len, {}, [full]], ids=["none", "module", "builtin", "dict", "list"]
)
def test_what_is_no_function_is_refused(value) -> None:
    with pytest.raises(UnrecognisedError, match="not a function"):
        recognise_rotation(value)
