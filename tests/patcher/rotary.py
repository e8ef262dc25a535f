"""Rotary embeddings of the tests: of halves and of neighbours, with angles in all recognised forms."""

from __future__ import annotations

import torch
from torch import nn


def half(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def rotates(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def of_a_first_part(q, k, cos, sin, unsqueeze_dim=1):
    width = cos.shape[-1]
    rotated = rotates(q[..., :width], k[..., :width], cos, sin, unsqueeze_dim)
    return tuple(torch.cat((y, x[..., width:]), dim=-1) for y, x in zip(rotated, (q, k), strict=True))


def with_positions(q, k, cos, sin, positions, unsqueeze_dim=1):
    return rotates(q, k, cos, sin, unsqueeze_dim)


def of_a_table(q, k, cos, sin, positions, unsqueeze_dim=1):
    return rotates(
        q, k, nn.functional.embedding(positions, cos), nn.functional.embedding(positions, sin), unsqueeze_dim
    )


def of_sections(q, k, cos, sin, sections, unsqueeze_dim=1, order=(0, 1, 2)):
    """Rotate by angles of time, height and width, each for its section of both halves."""
    which = torch.tensor(
        [order[place] for place, size in enumerate(sections) for _ in range(size)] * 2, device=cos.device
    )
    cos, sin = (
        angles.movedim(0, -1).gather(-1, which.expand(*cos.shape[1:])[..., None])[..., 0] for angles in (cos, sin)
    )
    return of_a_first_part(q, k, cos, sin, unsqueeze_dim)


def turns_views(q, k, cos, sin, unsqueeze_dim=1):
    """Rotate halves that hold the elements at even and at odd places, as DeepSeek-V3 does in transformers 4."""
    views = (x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).reshape(x.shape) for x in (q, k))
    return rotates(*views, cos, sin, unsqueeze_dim)


def of_pairs(q, k, cos, sin, unsqueeze_dim=1):
    """Rotate neighbours, by cos and sin with an angle for each pair."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    pairs = ((x[..., ::2], x[..., 1::2]) for x in (q, k))
    return tuple(torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2) for a, b in pairs)


def last_of_a_head(q, k, cos, sin, unsqueeze_dim=1):
    """Rotate the last elements of a head, as many as cos has."""
    width = cos.shape[-1]
    rotated = rotates(q[..., -width:], k[..., -width:], cos, sin, unsqueeze_dim)
    return tuple(torch.cat((x[..., :-width], y), dim=-1) for y, x in zip(rotated, (q, k), strict=True))
