"""Let a run's routers choose the experts that the stock run chose if scores are equal but for a rounding.

Either choice is right, but it decides which experts are trained: a run that chooses otherwise than the stock run is
further from it than roundings explain. After the same choice the two can be compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_LAST_PLACES = 2
"""The gap between two scores that is a near tie, in last places of the row's largest: each may be off by one."""


@dataclass
class Choices:
    """The choices of a run's calls of ``torch.topk``.

    Attributes:
        indices: the indices that each call chose, in order.
        rows: in which a call was made to choose as the stock run did.
    """

    indices: list[Tensor] = field(default_factory=list)
    rows: int = 0


@contextlib.contextmanager
def noted_choices(stock: Sequence[Tensor] = (), dtype: torch.dtype = torch.float32) -> Iterator[Choices]:
    """Keep what each ``torch.topk`` inside the ``with`` chooses, and let it choose as in the stock run at near ties.

    A row in which the stock run's choice has a lower score, by more than a near tie, is left as it is.

    Args:
        stock: the indices that each call chose in the stock run; without them nothing is changed.
        dtype: the coarsest in which scores are computed.
    """
    choices, topk = Choices(), torch.topk
    near = _LAST_PLACES * torch.finfo(dtype).eps

    # A mode of PyTorch's would see more calls than these, and fused code leaves them to stock code then.
    def noted(scores: Tensor, *args: Any, **named: Any) -> Any:
        result = topk(scores, *args, **named)
        own, call = result.indices, len(choices.indices)
        choices.indices.append(own.detach().clone())
        if call >= len(stock) or stock[call].shape != own.shape:
            return result
        gap = result.values.amin(-1) - scores.gather(-1, stock[call]).amin(-1)
        is_other = (own.sort(-1).values != stock[call].sort(-1).values).any(-1)
        turned = is_other & (gap <= near * scores.abs().amax(-1))
        choices.rows += int(turned.sum())
        indices = torch.where(turned.unsqueeze(-1), stock[call], own)
        return torch.return_types.topk((scores.gather(-1, indices), indices))

    torch.topk = noted  # type: ignore[assignment]
    try:
        yield choices
    finally:
        torch.topk = topk
