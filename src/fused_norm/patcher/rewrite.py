"""What is to be changed in a forward."""

from __future__ import annotations

from dataclasses import dataclass

from .activation_recognition import Activation


@dataclass(frozen=True)
class Rewrite:
    """A match in a forward that is to be fused.

    Attributes:
        pattern: the list that has the match: ``adds``, ``consumed_norms``, ``inputs``, ``heads``, ``rotations`` or
            ``gates``.
        index: its number among these.
        parts: what of it: of an add ``norm``, ``inner``, ``dropout`` and ``consumers``, and ``called`` for a norm whose
            call other code sees; of a consumed norm ``consumers`` and ``input``; of norms of heads ``rotation``, or
            nothing; of a rotation, by itself or of such heads, ``values``; of inputs the attributes of the linears;
            of a gate ``consumer``, or nothing.
        activation: that of a gate.
    """

    pattern: str
    index: int
    parts: tuple[str, ...] = ()
    activation: Activation | None = None
