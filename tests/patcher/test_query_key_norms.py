"""The norms of q and k are computed together, and with the rotation, only if nothing reads them in between."""

from __future__ import annotations

import textwrap

import pytest

from .forwards import Heads, Rewrite, assert_becomes, assert_unchanged, layer_of, patterns_of

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
    "rotates another": "NORMS; p, k = rotate(q, k, angles[0], angles[1]); return p, q, k",
    "rotates swapped": "NORMS; q, k = rotate(k, q, angles[0], angles[1])",
    "rotates by themselves": "NORMS; q, k = rotate(q, k, q.value, angles[1])",
    "rotates dynamically": "NORMS; q, k = rotate(q, k, angles[0], angles[1], unsqueeze_dim=self.factor)",
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


@pytest.mark.parametrize("name", PAIRS)
def test_both_norms_become_one_call_and_every_value_stays(name: str) -> None:
    before, after = PAIRS[name]
    attention = layer_of(with_return(before), "q, k, angles")
    (heads,) = patterns_of(attention).heads
    rewrites = (Rewrite("heads", 0, ("rotation",) if heads.rotate else ()),)
    assert_becomes(attention, with_return(after), ARGUMENTS, rewrites=rewrites)


LEFT_ALONE = {
    "reads between": "q = self.q_norm(q); total = q.value; k = self.k_norm(k); return q, k, total",
    "writes between": "raw = q; q = self.q_norm(q); raw.mul_(2); k = self.k_norm(k); raw.value = raw.value // 2",
    "an own method writes between": """
        q = Heads(q.value); normed = self.q_norm(q); k = self.k_norm(self.doubled(q))
        return normed, k
    """,
    "reads in a function": f"both = lambda: (q, k); {NORMS}; return both()",
    "only one": "q = self.q_norm(q); k = self.other(k.value)",
    "unpacked": "q, k = self.q_norm(q), self.k_norm(k)",
    "in two branches": """
        if self.flag:
            q = self.q_norm(q)
        else:
            k = self.k_norm(k)
    """,
    "transposes the rows": "q = self.q_norm(q).transpose(2, 3); k = self.k_norm(k).transpose(2, 3)",
    "transposes the rows of k": "q = self.q_norm(q).transpose(1, 2); k = self.k_norm(k).transpose(1, 2, 3)",
    "transposes by name": """
        q = self.q_norm(q).transpose(dim0=1, dim1=2)
        k = self.k_norm(k).transpose(dim0=1, dim1=2)
    """,
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_only_resembles_a_pair_is_left_alone(name: str) -> None:
    attention = layer_of(with_return(LEFT_ALONE[name]), "q, k")
    assert patterns_of(attention).heads == []
    assert_unchanged(attention, (Heads(2), Heads(3)))
