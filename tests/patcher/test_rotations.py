"""A rotary embedding is fused in any statement that calls it, and a rewritten forward returns the original's values."""

from __future__ import annotations

import pytest

from .forwards import Heads, Rewrite, assert_becomes, layer_of

FORWARDS = {
    "Llama": (
        "q = q.view(1).transpose(1, 2); cos, sin = angles; q, k = rotate(q, k, cos, sin); return q, k",
        """
        q = q.view(1).transpose(1, 2); cos, sin = angles
        q, k = self.fused_norm_rope(rotate, q, k, cos, sin); return q, k
        """,
    ),
    "under an if": (
        """
        q = self.q_norm(q); k = self.k_norm(k)
        if self.flag:
            q, k = rotate(q, k, angles[0], angles[1], unsqueeze_dim=2)
        return q, k
        """,
        """
        q = q; k = k; q, k = self.fused_norm_pair(self.q_norm, self.k_norm, q, k)
        if self.flag:
            q, k = self.fused_norm_rope(rotate, q, k, angles[0], angles[1], unsqueeze_dim=2)
        return q, k
        """,
    ),
    "norms after": (
        """
        q, k = rotate(q, k, angles[0], angles[1])
        q = self.query_layernorm(q); k = self.key_layernorm(k)
        return q, k
        """,
        """
        q, k = self.fused_norm_rope(rotate, q, k, angles[0], angles[1]); q = q; k = k
        q, k = self.fused_norm_pair(self.query_layernorm, self.key_layernorm, q, k); return q, k
        """,
    ),
    "parts of heads": (
        "a, b = rotate(q.view(1), k.view(1), angles[0], angles[1], unsqueeze_dim=self.factor); return b, a",
        """
        a, b = self.fused_norm_rope(rotate, q.view(1), k.view(1), angles[0], angles[1], unsqueeze_dim=self.factor)
        return b, a
        """,
    ),
    "one by one": (
        """
        cos, sin = angles; q = rotate_one(q, cos, sin, unsqueeze_dim=2); q = q.transpose(1, 2)
        k = rotate_one(self.k_norm(k), cos, sin)
        return q, k
        """,
        """
        cos, sin = angles; q = self.fused_norm_rope_one(rotate_one, q, cos, sin, unsqueeze_dim=2)
        q = q.transpose(1, 2); k = self.fused_norm_rope_one(rotate_one, self.k_norm(k), cos, sin)
        return q, k
        """,
    ),
    "otherwise": (
        """
        q, k = rotate(q, k, angles[0], sin=angles[1]); q, k = rotate(q, k, *angles, 2)
        return rotate(q, k, angles[0], angles[1], 2, *())
        """,
        """
        q, k = rotate(q, k, angles[0], sin=angles[1]); q, k = rotate(q, k, *angles, 2)
        return rotate(q, k, angles[0], angles[1], 2, *())
        """,
    ),
    "no rotation": (
        "q, k = embed(q, k, angles[0], angles[1]); return q, k",
        "q, k = embed(q, k, angles[0], angles[1]); return q, k",
    ),
}
"""The body of an attention's forward, before and after its rotations are fused."""

ARGUMENTS = Heads(2), Heads(3), (5, 7)


@pytest.mark.parametrize("name", FORWARDS)
def test_rotations_become_fused_calls_and_every_value_stays(name: str) -> None:
    before, after = FORWARDS[name]
    assert_becomes(layer_of(before, "q, k, angles"), after, ARGUMENTS)


def test_what_takes_the_results_of_a_pair_of_norms_is_a_rotation_under_any_name() -> None:
    body = "q = self.q_norm(q); k = self.k_norm(k); q, k = embed(q, k, angles[0], angles[1]); return q, k"
    attention = layer_of(body, "q, k, angles")
    fused = body.replace("= embed(", "= self.fused_norm_rope(embed, ")
    assert_becomes(attention, fused, ARGUMENTS, rewrites=(Rewrite("rotations", 0),))
    fused = """
        q = q; k = k; q, k = self.fused_norm_rotated(self.q_norm, self.k_norm, embed, q, k, angles[0], angles[1])
        return q, k
    """
    assert_becomes(attention, fused, ARGUMENTS)
