"""The base of the operators on q and k: the norm of their heads, and their rotation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .arguments import Refusal, angles_beyond_kernels, other_dtype
from .operator import BackwardCall, Operator, Route, Spec


class HeadsOperator(Operator):
    """An operator on q and k, whose outputs and ``gradients`` are those of q and of k by turns.

    Kernels take angles that are the same for all heads and want no gradient. A side that is unused, or that needs no
    gradient, gets no work in the backward.
    """

    def beyond_kernels(self, spec: Spec, *arguments: Any) -> Refusal | None:
        q, *_ = arguments
        cos, sin = arguments[self.tensor_count - 2 : self.tensor_count]
        return None if cos is None else angles_beyond_kernels(q, cos, sin, arguments[self.tensor_count])

    def unlike_stock(self, spec: Spec, *arguments: Any) -> str | None:
        return other_dtype("q", "k", *arguments[:2])

    def without_gradient(self, needed: Sequence[bool]) -> tuple[int, ...]:
        return tuple(side for side in (0, 1) if not any(needed[side::2]))

    def gradients_by(self, route: Route, spec: Spec, call: BackwardCall) -> tuple[Tensor | None, ...]:
        idle = [side for side, d in enumerate(call.incoming) if d is None or not any(call.needed[side::2])]
        incoming = [None if side in idle else d for side, d in enumerate(call.incoming)]
        needed = [need and place % 2 not in idle for place, need in enumerate(call.needed)]
        if not any(needed):
            return (None,) * len(needed)
        return super().gradients_by(route, spec, call._replace(incoming=incoming, needed=needed))
