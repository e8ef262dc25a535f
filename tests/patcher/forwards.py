"""Modules with plain arithmetic for norms, which record the fused calls that a rewritten forward makes."""

from __future__ import annotations

from fused_norm.patcher.forward_rewrite import Rewrite, patterns_of, rewritten_forward
from fused_norm.patcher.query_key_norms import PairRewrite
from fused_norm.patcher.residual_adds import AddRewrite


class Recorder:
    """The parts that forwards use. No two of them commute, so an operand out of place changes the value."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.flag = True
        self.factor = 7
        self.may_postpone = True

    def norm(self, x):
        return x * 3 + 1

    def other(self, x):
        return x * 5 + 2

    def inner(self, x):
        return x * 11 + 4

    def pair(self, x):
        return x, x + 1

    def q_norm(self, x):
        return Heads(x.value * 13 + 1)

    def k_norm(self, x):
        return Heads(x.value * 17 + 3)

    query_layernorm, key_layernorm = q_norm, k_norm

    def fused_norm_add(self, norm, residual, branch, *, inner=None, scale=1):
        self.calls.append(f"add {norm.__name__} {inner and inner.__name__} {scale}")
        total = residual + (inner(branch) if inner else branch) * scale
        return norm(total), total

    def fused_norm_onto(self, inner, residual, branch):
        self.calls.append(f"onto {inner.__name__}")
        return residual + inner(branch)

    def fused_norm_may_postpone(self, q_norm, k_norm):
        self.calls.append(f"may postpone {q_norm.__name__} {k_norm.__name__}")
        return self.may_postpone

    def fused_norm_unless(self, postponed, norm, x):
        return x if postponed else norm(x)

    def fused_norm_pair(self, postponed, q_norm, k_norm, q, k):
        self.calls.append("pair")
        return (q_norm(q), k_norm(k)) if postponed else (q, k)

    def fused_norm_rotated(self, postponed, q_norm, k_norm, rotate, q, k, cos, sin, **named):
        self.calls.append("rotated")
        q, k = (q_norm(q), k_norm(k)) if postponed else (q, k)
        return rotate(q, k, cos, sin, **named)


class Heads:
    """A number with the methods of q and k that attentions call on them."""

    def __init__(self, value: int) -> None:
        self.value = value

    def transpose(self, *dims: int, **named: int) -> Heads:
        return Heads(self.value * 19 + 2) if 3 in dims else self

    def view(self, *shape: object) -> Heads:
        return self

    def mul_(self, factor: int) -> Heads:
        self.value *= factor
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Heads) and self.value == other.value

    __hash__ = None


def rotate(q: Heads, k: Heads, cos: int, sin: int, unsqueeze_dim: int = 1) -> tuple[Heads, Heads]:
    return Heads(q.value * cos + sin), Heads(k.value * cos - sin * unsqueeze_dim)


def everything(layer: type) -> tuple[Rewrite, ...]:
    """The rewrites that fuse all that was found in a forward."""
    patterns = patterns_of(layer)
    adds = (AddRewrite(i, bool(add.norm), bool(add.inner)) for i, add in enumerate(patterns.adds))
    pairs = (PairRewrite(i, bool(pair.rotate)) for i, pair in enumerate(patterns.pairs))
    return (*adds, *pairs)


def run(
    layer: type, *arguments: object, rewrites: tuple[Rewrite, ...] | None = None, may_postpone: bool = True
) -> list[str]:
    """The fused calls of the rewritten forward, which has returned what the original returns."""
    instance = layer()
    instance.may_postpone = may_postpone
    expected = instance.forward(*arguments)
    assert instance.calls == []
    forward = rewritten_forward(layer, everything(layer) if rewrites is None else rewrites)
    assert forward(instance, *arguments) == expected
    return instance.calls
