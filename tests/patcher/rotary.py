"""Rotary embeddings that turn halves, as the tests write them: with angles in all forms that are known."""

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
    return tuple(torch.cat((one, x[..., width:]), dim=-1) for one, x in zip(rotated, (q, k), strict=True))


def with_positions(q, k, cos, sin, positions, unsqueeze_dim=1):
    return rotates(q, k, cos, sin, unsqueeze_dim)


def of_a_table(q, k, cos, sin, positions, unsqueeze_dim=1):
    return rotates(
        q, k, nn.functional.embedding(positions, cos), nn.functional.embedding(positions, sin), unsqueeze_dim
    )


def of_sections(q, k, cos, sin, sections, unsqueeze_dim=1, order=(0, 1, 2)):
    """With angles of time, height and width, each for its section of both halves."""
    which = torch.tensor(
        [order[place] for place, size in enumerate(sections) for _ in range(size)] * 2, device=cos.device
    )
    cos, sin = (
        angles.movedim(0, -1).gather(-1, which.expand(*cos.shape[1:])[..., None])[..., 0] for angles in (cos, sin)
    )
    return of_a_first_part(q, k, cos, sin, unsqueeze_dim)
