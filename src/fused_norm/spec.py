"""The meaning of a norm as data, and the words that every other file uses for it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

Casting = Literal["llama", "gemma", "rounded_gamma", "weight_dtype", "rounded_rstd", "none"]
RotaryLayout = Literal["half", "interleaved", "deinterleaved"]
Kind = Literal["norm", "qk", "rope", "residual", "post_norm", "mlp", "conv", "experts", "linear_4bit", "lora", "loss"]

CASTINGS: tuple[Casting, ...] = get_args(Casting)
KINDS: tuple[Kind, ...] = get_args(Kind)
ROTARY_LAYOUTS: tuple[RotaryLayout, ...] = get_args(RotaryLayout)
"""Which elements of a head RoPE turns together, see ``fused_norm.kernels.rope``."""
NORM_KINDS: tuple[Kind, ...] = ("norm", "qk")
"""The kinds of sites that are norms, and can be called on their own."""


class FusedNormError(RuntimeError):
    """A model that cannot be patched as asked; it is left as it was."""


@dataclass(frozen=True)
class NormSpec:
    """The meaning of one RMSNorm: two norms with equal specs are interchangeable.

    ``y = x * rsqrt(mean(x^2) + eps) * gamma``, where gamma is the weight, ``1 + weight`` when zero-centered, or
    nothing when there is no weight.

    Attributes:
        casting: where results are rounded. ``llama``: computed in fp32, rounded to the input's dtype before gamma, and
            the product has the promoted dtype of input and weight. ``gemma``: all of it in fp32, gamma included, and
            one rounding to the input's dtype. ``rounded_gamma``: as ``gemma``, but a zero-centered gamma is rounded to
            the weight's dtype first. ``weight_dtype``: as ``llama``, but rounded to the weight's dtype, which the
            product has as well. ``rounded_rstd``: as ``llama``, but the inverse root is rounded to the input's dtype
            too, before the row is multiplied by it. ``none``: every step is rounded to the input's dtype, and the
            product has the promoted dtype.
        zero_centered: gamma is ``1 + weight``.
        weighted: the norm has a weight.
        eps: added to the mean of squares, in fp32.
        casts_weight: under ``gemma`` and ``rounded_gamma`` a 16-bit weight is cast to fp32 before a row is multiplied
            by it, and a backward reads that cast; otherwise the product casts it, and a backward reads the weight
            itself.
    """

    casting: Casting
    zero_centered: bool = False
    weighted: bool = True
    eps: float = 1e-6
    casts_weight: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        if self.casting not in CASTINGS:
            raise ValueError(f"casting must be one of {', '.join(CASTINGS)}, not {self.casting!r}")
        if self.zero_centered and not self.weighted:
            raise ValueError("zero_centered needs a weight: without one there is no gamma to centre")

    def without_eps(self) -> NormSpec:
        """The part of the meaning that kernels are compiled for."""
        return replace(self, weighted=True, eps=0.0, casts_weight=True)

    def __str__(self) -> str:
        gamma = "1 + weight" if self.zero_centered else "weight" if self.weighted else "no weight"
        return f"{self.casting}, {gamma}, eps {self.eps:g}"


@dataclass(frozen=True)
class GatedNormSpec(NormSpec):
    """The meaning of an RMSNorm with a gate: ``y = norm(x) * act(gate)`` or ``y = norm(x * act(gate))``.

    Activation and products are computed in fp32; the norm is rounded as by itself, and the result to the input's dtype
    if the norm comes first.

    Attributes:
        activation: ``silu`` or ``sigmoid``.
        norm_before_gate: the norm comes first, not the gate.
        groups: equal parts of a row, each normalised by itself.
        width: of the rows that are known to have so many groups; 0 if there is one group.
    """

    activation: str = "silu"
    norm_before_gate: bool = True
    groups: int = 1
    width: int = 0

    def __str__(self) -> str:
        norm = super().__str__() if self.groups == 1 else f"{super().__str__()} in {self.groups} groups"
        gate = f"{self.activation}(gate)"
        return f"{norm}, then {gate}" if self.norm_before_gate else f"{gate}, then {norm}"
