"""Makes the spec of a norm from users' arguments, which it checks."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..spec import Casting, NormSpec
from .arguments import check_eps, check_flag


def norm_spec(casting: Casting, zero_centered: bool, eps: float, casts_weight: bool = True) -> NormSpec:
    """The meaning of a call's norm; equal arguments give the same object.

    Raises:
        TypeError: for an eps that is no number, and a ``zero_centered`` that is neither True nor False.
        ValueError: for an unknown casting, and an eps that is negative or not finite.
    """
    make = _new_spec if torch.compiler.is_compiling() else _cached_spec
    return make(casting, zero_centered, eps, casts_weight)


def _new_spec(casting: Casting, zero_centered: bool, eps: float, casts_weight: bool) -> NormSpec:
    refusal = check_flag("zero_centered", zero_centered) or check_eps(eps)
    if refusal is not None and refusal.error is not None:
        raise refusal.error(refusal.reason)
    return NormSpec(casting, zero_centered, eps=float(eps), casts_weight=casts_weight)


_cached_spec = lru_cache(maxsize=1024, typed=True)(_new_spec)
