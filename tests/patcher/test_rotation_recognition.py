"""A rotation is recognised by its results and their dtypes, and nothing else is recognised as a rotation."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.blt.modeling_blt import apply_rotary_pos_emb as interleaved
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave as deinterleaved
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as first_by_pair
from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb as partial
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as halved
from transformers.models.helium.modeling_helium import apply_rotary_pos_emb as by_pair
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as full
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as rounding
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision as vision

import fused_norm

from .forwards import layer_of
from .models import equal_in_fp32
from .rotary import half, last_of_a_head, of_a_table, of_pairs, of_sections, rotates, turns_views, with_positions

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [
    (FP32, FP32), (BF16, BF16), (FP16, FP16), (BF16, FP32), (FP16, FP32), (FP32, BF16), (FP32, FP16),
]  # fmt: skip
"""Of the heads, and of cos and sin."""


def attention(function: Any, further: str = "") -> tuple[nn.Module, str | None]:
    """A patched attention that calls this function, and the reason if that is not fused."""
    package = getattr(function, "__module__", __name__)
    body, names = f"return apply_rotary_pos_emb(q, k, cos, sin{further})", {"apply_rotary_pos_emb": function}
    module = layer_of(body, f"q, k, cos, sin{further}", nn.Module, names | {"__name__": package})()
    (row,) = fused_norm.apply_fused_norm(nn.ModuleList([module]), strict=False).rows
    assert row.kind == "rope"
    return module, row.reason


def fp32_inside(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim).float(), sin.unsqueeze(unsqueeze_dim).float()
    return tuple((x.float() * cos + half(x.float()) * sin).to(x.dtype) for x in (q, k))


def fp64_inside(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim).double(), sin.unsqueeze(unsqueeze_dim).double()
    return tuple((x.double() * cos + half(x.double()) * sin).to(x.dtype) for x in (q, k))


POSITIONS = torch.tensor([[3, 0, 2, 1, 4], [6, 5, 4, 3, 2]])
KNOWN: dict[str, tuple[Callable[..., Any], tuple[int, ...], list[Any]]] = {
    "full": (full, (2, 5, 16), []),
    "of the first part of a head": (partial, (2, 5, 8), []),
    "by half of the angles": (halved, (2, 5, 8), []),
    "with a cast of the result": (rounding, (2, 5, 16), []),
    "in fp32": (fp32_inside, (2, 5, 16), []),
    "of a tower": (vision, (5, 16), []),
    "of neighbours": (interleaved, (2, 5, 16), []),
    "of neighbours by the angles of pairs": (by_pair, (2, 5, 16), []),
    "of the first neighbours": (first_by_pair, (2, 5, 8), []),
    "of neighbours by half of the angles": (of_pairs, (2, 5, 8), []),
    "of neighbours that become halves": (deinterleaved, (2, 5, 16), []),
    "of views": (turns_views, (2, 5, 16), []),
    "at positions of a table": (of_a_table, (7, 16), [POSITIONS]),
    "by sections": (of_sections, (3, 2, 5, 16), [[5, 1, 2]]),
    "with positions that it ignores": (with_positions, (2, 5, 16), [POSITIONS]),
}
"""Functions, the shape of cos and of sin, and what comes after sin."""


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_rotation_is_fused_with_its_pairs_its_angles_and_its_rounding(
    name: str, device: str, launches: list[str]
) -> None:
    function, shape, further = KNOWN[name]
    module, reason = attention(function, ", further" * len(further))
    assert reason is None
    further = [value.to(device) if isinstance(value, Tensor) else value for value in further]
    for heads_dtype, dtype in DTYPES:
        q, k = (torch.randn(2, heads, 5, 16, device=device).to(heads_dtype) for heads in (4, 2))
        if len(shape) == 2 and not further:
            q, k = q[0].transpose(0, 1), k[0].transpose(0, 1)
        cos, sin = torch.randn(2, *shape, device=device).to(dtype)
        launches.clear()
        actual = module(q, k, cos, sin, *further)
        assert launches == ["rope"]
        for mine, stock in zip(actual, function(q, k, cos, sin, *further), strict=True):
            assert equal_in_fp32(mine, stock), (heads_dtype, dtype)


OF_OTHER_ANGLES = {
    "other sections": lambda q, k, cos, sin, sections, unsqueeze_dim=1: of_sections(
        q, k, cos, sin, sections, unsqueeze_dim, order=(1, 0, 2)
    ),
    "as many as the last": lambda q, k, cos, sin, sections, unsqueeze_dim=1: of_sections(
        q, k, cos, sin, [1, cos.shape[-1] // 2 - sections[2] - 1, sections[2]], unsqueeze_dim
    ),
    "sin at its place": lambda q, k, cos, sin, positions, unsqueeze_dim=1: rotates(
        q, k, cos[positions], sin[: q.shape[-2]].expand(2, -1, -1), unsqueeze_dim
    ),
}


@torch.no_grad()
def without_gradients(q, k, cos, sin, unsqueeze_dim=1):
    return full(q, k, cos, sin, unsqueeze_dim)


OTHERS = {
    "its last elements": last_of_a_head,
    "neighbours of pairs": lambda q, k, cos, sin, unsqueeze_dim=1: tuple(
        x.roll(1, -1) for x in interleaved(q.roll(-1, -1), k.roll(-1, -1), cos, sin, unsqueeze_dim)
    ),
    "neighbours by the angles of the next pair": lambda q, k, cos, sin, unsqueeze_dim=1: by_pair(
        q, k, cos.roll(1, -1), sin.roll(1, -1), unsqueeze_dim
    ),
    "backwards": lambda q, k, cos, sin, unsqueeze_dim=1: full(q, k, cos, -sin, unsqueeze_dim=unsqueeze_dim),
    "q alone": lambda q, k, cos, sin, unsqueeze_dim=1: (full(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)[0], k),
    "deaf": lambda q, k, cos, sin, unsqueeze_dim=1: full(q, k, cos, sin),
    "with positions": with_positions,
    "in fp64": fp64_inside,
    "k detached": lambda q, k, cos, sin, unsqueeze_dim=1: full(q, k.detach(), cos, sin, unsqueeze_dim=unsqueeze_dim),
    "without gradients": without_gradients,
    "others for a batch of one": lambda q, k, cos, sin, unsqueeze_dim=1: full(
        q, k, cos, sin if cos.shape[0] > 1 else -sin, unsqueeze_dim=unsqueeze_dim
    ),
    "a tower with other angles without a batch": lambda q, k, cos, sin: vision(
        q, k, cos, -sin if q.dim() > cos.dim() + 1 else sin
    ),
}


@pytest.mark.parametrize("name", [*OTHERS, *OF_OTHER_ANGLES])
def test_other_functions_and_other_angles_are_refused(name: str) -> None:
    further = ", further" * (name in OF_OTHER_ANGLES)
    _, reason = attention((OTHERS | OF_OTHER_ANGLES)[name], further)
    assert "does not compute a rotation of pairs of q and k" in (reason or "")


@pytest.mark.parametrize("value", [nn.Linear(2, 2), len, {}], ids=["module", "builtin", "dict"])
def test_what_is_no_function_is_refused(value: Any) -> None:
    assert "not a function" in (attention(value)[1] or "")


class AsModule(nn.Module):
    """Return the module that the package ``kernels`` turns a function into."""

    def forward(self, *args, **named):
        return rotates(*args, **named)


def test_a_module_that_rotates_is_fused_while_its_call_is_its_own_forward(device: str, launches: list[str]) -> None:
    rotation, seen = AsModule(), []
    module, reason = attention(rotation)
    assert reason is None
    arguments = [torch.randn(1, 2, 5, 16, device=device) for _ in "qk"]
    arguments += [torch.randn(1, 5, 16, device=device) for _ in "cs"]
    module(*arguments)
    rotation.forward = AsModule.forward.__get__(rotation)  # `kernelize` leaves this if it has no kernel
    module(*arguments)
    assert launches == ["rope", "rope"]
    rotation.forward = lambda q, k, cos, sin: (k, q)
    assert module(*arguments)[0] is arguments[1]
    assert "not a function" in (attention(rotation)[1] or "")
    del rotation.forward
    rotation.register_forward_hook(lambda *_: seen.append("a call"))
    assert attention(rotation)[1] is None
    assert seen == []
    module(*arguments)
    assert seen == ["a call"]
    assert launches == ["rope", "rope"]


class OfOthers(torch.autograd.Function):
    """A kernel of another library, like Liger's for rotations."""

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        pytest.fail("it was tried")


class Holder:
    kernels = types.SimpleNamespace, [OfOthers]

    @staticmethod
    def run():
        return Holder.kernels


MODULE = types.ModuleType("module")
MODULE.kernel = OfOthers  # type: ignore[attr-defined]


def with_default(x, kernel=OfOthers):
    return kernel.apply(x)


REACH_A_KERNEL: dict[str, Any] = {
    "a global": lambda x: OfOthers.apply(x),
    "a class and a list on it": lambda x: Holder.run(),
    "an attribute of a module": lambda x: MODULE.kernel(x),
    "a default": with_default,
    "a partial function": functools.partial(print, OfOthers),
    "a variable of a function around": (lambda kernel: lambda x: kernel.apply(x))(OfOthers),
}


@pytest.mark.parametrize("way", REACH_A_KERNEL)
def test_a_rotation_that_reaches_a_kernel_of_others_is_not_tried(way: str) -> None:
    reached = REACH_A_KERNEL[way]

    def rotates_otherwise(q, k, cos, sin, unsqueeze_dim=1):
        return reached(q) if q is None else rotates(q, k, cos, sin, unsqueeze_dim)

    assert f"runs {__name__}.OfOthers, which is not tried" in (attention(rotates_otherwise)[1] or "")
