"""The forms in which rotary embeddings take cos and sin: for each element, for one half, as a table, by sections.

A form is a function ``form(angles, *further)``: of cos, or of sin, and of what the rotary embedding takes after sin, it
makes [batch, tokens, width], which is unsqueezed at the dimension of the heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

AngleForm = Callable[..., Tensor]
Random = Callable[..., Tensor]
Sample = tuple[Tensor, Tensor, tuple[Any, ...]]
"""cos, sin, and what comes after them."""

_TABLE = 7


def of_each_element(angles: Tensor) -> Tensor:
    """[batch, tokens, width] as it is."""
    return angles


def of_one_half(angles: Tensor) -> Tensor:
    """[batch, tokens, width / 2], which both halves of a head share."""
    return torch.cat((angles, angles), dim=-1)


def at_positions(angles: Tensor, positions: Any) -> Tensor:
    """The rows of a table [length, width] at positions [batch, tokens]."""
    return angles[positions] if angles.dim() == 2 else angles


def by_sections(angles: Tensor, sections: Any) -> Tensor:
    """Sections of [3, batch, tokens, width], which are those of time, height and width by turns (Qwen2-VL)."""
    if angles.dim() != 4:
        return angles
    parts = angles.split(sections * 2, dim=-1)
    return torch.cat([part[index % 3] for index, part in enumerate(parts)], dim=-1)


def without_positions(angles: Tensor, positions: Any) -> Tensor:
    """[batch, tokens, width] as it is; positions are taken, and not used."""
    return angles


FORMS: dict[int, tuple[AngleForm, ...]] = {
    0: (of_each_element, of_one_half),
    1: (at_positions, by_sections, without_positions),
}
"""By the number of arguments after sin."""


def samples(form: AngleForm, batches: Sequence[int], tokens: int, width: int, random: Random) -> Iterator[Sample]:
    """Angles, with what comes after them, that tell a form from every other.

    ``width``: of a head, or of the first part of it that is rotated; ``random(*shape)`` gives numbers.
    """
    half = width // 2
    for batch in batches:
        shape: tuple[int, ...] = (batch, tokens, width)
        further: list[tuple[Any, ...]] = [()]
        if form is of_one_half:
            shape = batch, tokens, half
        elif form is at_positions:
            shape, further = (_TABLE, width), [(torch.arange(batch * tokens).view(batch, tokens) * 3 % _TABLE,)]
        elif form is by_sections:
            shape, further = (3, batch, tokens, width), [([half - 2, 1, 1],), ([1, 2, half - 3],)]
        elif form is without_positions:
            further = [(None,), (torch.arange(batch * tokens).view(batch, tokens),)]
        for one in further:
            yield random(*shape), random(*shape), one
