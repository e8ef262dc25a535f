"""q and k under test: normed, normed and rotated, and only rotated, compared with the stock code and float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.models.blt.modeling_blt import apply_rotary_pos_emb as rotate_neighbours
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as rotate_neighbours_in_fp32
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as rotate_first_neighbours_by_pair
from transformers.models.helium.modeling_helium import apply_rotary_pos_emb as rotate_neighbours_by_pair
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_whole
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb as rotate_part

from fused_norm.kernels import qk_norm, qk_norm_rope, rope

from .numerics import BF16, FP32, ROUND_RSTD, Norm, Scales, Tensors, assert_near, called, drawn, none_rounded_once, run


@dataclass(frozen=True)
class Heads:
    """The norms of q and k under test, and the rotation after them."""

    norm: Norm
    rotary: int = 0
    angles: torch.dtype = BF16

    def __str__(self) -> str:
        rope = f"-rope{self.rotary}-{self.angles}".replace("torch.", "") if self.rotary else ""
        return f"{self.norm}{rope}"

    def inputs(
        self, width: int, device: str, batch: int = 2, q_heads: int = 3, k_heads: int = 2, tokens: int = 5
    ) -> Tensors:
        """Return q and k as [B, H, S, D], views of [B, S, H, D]; the halves of cos and sin differ."""
        norm = self.norm
        dtype = norm.x if norm.w is None or norm.casting == "gemma" else torch.promote_types(norm.x, norm.w)
        if self.rotary:
            dtype = torch.promote_types(dtype, self.angles)
        q, k = ((batch, tokens, count, width) for count in (q_heads, k_heads))
        tensors = drawn(
            device,
            q=(q, norm.x, 1.5),
            k=(k, norm.x, 1.5),
            q_weight=((width,), norm.w, 1.5),
            k_weight=((width,), norm.w, 1.5),
            cos=((batch, tokens, self.rotary), FP32 if self.rotary else None, 3.0),
            dq_out=(q, dtype, 1.0),
            dk_out=(k, dtype, 1.0),
        )
        tensors = tensors.mapped(lambda tensor: tensor.transpose(1, 2) if tensor.dim() == 4 else tensor).but(
            unsqueeze_dim=1
        )
        if not self.rotary:
            return tensors
        return tensors.but(cos=tensors.cos.cos().to(self.angles), sin=tensors.cos.sin().to(self.angles))

    def fused(self, inputs: Tensors) -> tuple[Tensor, Tensor]:
        i, semantics = inputs, {"casting": self.norm.casting, "zero_centered": self.norm.zero_centered}
        if not self.rotary:
            return qk_norm(i.q, i.k, i.q_weight, i.k_weight, self.norm.eps, **semantics)
        return qk_norm_rope(
            i.q, i.k, i.q_weight, i.k_weight, i.cos, i.sin, self.norm.eps, unsqueeze_dim=i.unsqueeze_dim, **semantics
        )

    def rotated(self, q: Tensor, k: Tensor, inputs: Tensors) -> tuple[Tensor, Tensor]:
        """Rotate q and k by transformers' own RoPE if there are angles."""
        if not self.rotary:
            return q, k
        rotate = rotate_whole if self.rotary == q.shape[-1] else rotate_part
        return rotate(q, k, inputs.cos, inputs.sin, unsqueeze_dim=inputs.unsqueeze_dim)

    def _by(self, norm: Callable[[Tensor, Tensor | None], Tensor], i: Tensors) -> tuple[Tensor, Tensor]:
        return self.rotated(norm(i.q, i.q_weight), norm(i.k, i.k_weight), i)

    def stock(self, inputs: Tensors) -> tuple[Tensor, Tensor]:
        """Compute the norms as modelling code does, and transformers' own RoPE."""
        return self._by(lambda x, w: self.norm.stock(x, None, w)[0], inputs)

    def rounded(self, inputs: Tensors) -> tuple[Tensor, Tensor]:
        """Compute the stock result with every step rounded once, see ``none_rounded_once``."""
        if self.norm.casting != "none":
            return self.stock(inputs)
        return self._by(lambda x, w: none_rounded_once(x, w, self.norm.eps, self.norm.zero_centered), inputs)

    def true(self, inputs: Tensors) -> tuple[Tensor, Tensor]:
        return self._by(lambda x, w: self.norm.true(x, None, w)[0], inputs)

    def assert_right(self, inputs: Tensors) -> Tensors:
        """Assert the rule of ``numerics`` for every result, and stock's strides and rounding points for the outputs."""
        ours, stock = run(self.fused, inputs), run(self.stock, inputs)
        scale = scales(self, inputs)
        assert_near(ours, stock, run(self.true, inputs.mapped(Tensor.double)), scale)
        for name, rounded in called(self.rounded, inputs).present().items():
            value = getattr(ours, name)
            assert steps(value) == steps(getattr(stock, name)), name
            moved = (value.double() - rounded.double()).abs().div(scale[name]) > 16 * torch.finfo(FP32).eps
            share = 0.01 + 2 / value.numel()
            if self.norm.casting in ROUND_RSTD:
                share += 2 * value.shape[-1] / value.numel()
            assert moved.double().mean() <= share, f"{name}: {moved.double().mean():.2%} were rounded elsewhere"
        return ours


@dataclass(frozen=True)
class Rotated(Heads):
    """q and k that are only rotated, in one of the layouts, rounded after each operation or ``once``."""

    layout: str = "half"
    by_pair: bool = False
    once: bool = False

    def __str__(self) -> str:
        words = [self.layout, *(["by pair"] if self.by_pair else []), *(["once"] if self.once else [])]
        return f"{self.norm.x}-{self.angles}-{self.rotary}-{' '.join(words)}".replace("torch.", "")

    def fused(self, inputs: Tensors) -> tuple[Tensor, Tensor]:
        options = {"single_rounding": self.once, "layout": self.layout, "angles_by_pair": self.by_pair}
        return rope(inputs.q, inputs.k, inputs.cos, inputs.sin, unsqueeze_dim=inputs.unsqueeze_dim, **options)

    def rotated(self, q: Tensor, k: Tensor, inputs: Tensors) -> tuple[Tensor, Tensor]:
        is_part = self.rotary < q.shape[-1]
        rotate = {
            ("half", False): rotate_part if is_part else rotate_whole,
            ("interleaved", False): rotate_neighbours,
            ("interleaved", True): rotate_first_neighbours_by_pair if is_part else rotate_neighbours_by_pair,
            ("deinterleaved", False): rotate_deinterleaved,
            ("deinterleaved", True): rotate_deinterleaved_by_pair,
        }[self.layout, self.by_pair]
        if self.once and self.layout == "interleaved" and q.dtype != torch.float64:
            rotate = rotate_neighbours_in_fp32  # as in Cohere, whose own code would cast float64 to fp32
        return rotate(q, k, inputs.cos, inputs.sin, unsqueeze_dim=inputs.unsqueeze_dim)

    def stock(self, inputs: Tensors) -> tuple[Tensor, Tensor]:
        """Compute transformers' own RoPE; if rounded once, on float32 tensors, or on float64 ones for the reference."""
        if not self.once or self.layout != "half":
            return self.rotated(inputs.q, inputs.k, inputs)
        wide = inputs.mapped(lambda tensor: tensor if tensor.dtype == torch.float64 else tensor.float())
        q, k = self.rotated(wide.q, wide.k, wide)
        return q.to(inputs.q.dtype), k.to(inputs.k.dtype)

    def assert_right(self, inputs: Tensors) -> Tensors:
        """Assert stock's bits and strides for outputs; gradients are as near to float64, with strides as q and k."""
        ours, stock = run(self.fused, inputs), run(self.stock, inputs)
        units = {f"d{side}": getattr(inputs, f"d{side}_out").double().abs().amax(-1, keepdim=True) for side in "qk"}
        assert_near(ours, stock, run(self.stock, inputs.mapped(Tensor.double)), units)
        for name in ("q_out", "k_out"):
            assert torch.equal(getattr(ours, name), getattr(stock, name)), name
            assert steps(getattr(ours, name)) == steps(getattr(stock, name)), name
        for gradient, x in ((ours.dq, inputs.q), (ours.dk, inputs.k)):
            assert steps(gradient) == steps(torch.empty_like(x))
        return ours


def rotated(rotary: int = 16, x: torch.dtype = BF16, angles: torch.dtype = BF16, **way: Any) -> Rotated:
    return Rotated(Norm("llama", x=x, w=None), rotary, angles, **way)


def deinterleaved(x: Tensor) -> Tensor:
    """Put the elements at even places before those at odd ones, as DeepSeek-V3 does before it rotates halves."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).reshape(x.shape)


def rotate_deinterleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> tuple[Tensor, Tensor]:
    return rotate_whole(deinterleaved(q), deinterleaved(k), cos, sin, unsqueeze_dim=unsqueeze_dim)


def rotate_deinterleaved_by_pair(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int
) -> tuple[Tensor, Tensor]:
    cos, sin = (torch.cat(2 * [angles.chunk(2, dim=-1)[0]], dim=-1) for angles in (cos, sin))
    return rotate_deinterleaved(q, k, cos, sin, unsqueeze_dim)


def scales(heads: Heads, inputs: Tensors) -> Scales:
    """Return the units of errors: a row's largest normalised value, or the largest term of a gradient."""
    wide, units = inputs.mapped(Tensor.double), {}
    for side in "qk":
        x, weight, d = (getattr(wide, name) for name in (side, f"{side}_weight", f"d{side}_out"))
        n = heads.norm.true(x, None, weight)[0].requires_grad_()
        dn = torch.autograd.grad(heads.rotated(n, n, wide)[0], n, d)[0].abs()
        rstd = (x.square().mean(-1, keepdim=True) + heads.norm.eps).rsqrt()
        gamma = torch.ones(()) if weight is None else (1 + weight if heads.norm.zero_centered else weight).abs()
        units[f"{side}_out"] = n.detach().abs().amax(-1, keepdim=True)
        units[f"d{side}"] = (dn * gamma * rstd).amax(-1, keepdim=True)
        units[f"d{side}_weight"] = (dn * (x * rstd).abs()).sum((0, 1, 2))
    return units


def steps(tensor: Tensor) -> list[int]:
    """Return the strides of dimensions with more than one element."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
