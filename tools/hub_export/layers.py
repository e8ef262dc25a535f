"""The layer that the Hugging Face kernels hub binds to norms.

An export holds a copy of this file whose imports from ``fused_norm`` are relative, so it imports only what
``command.py`` copies too.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fused_norm.kernels.arguments import check_eps
from fused_norm.kernels.norm import RMS_NORM
from fused_norm.kernels.norm_spec import norm_spec
from fused_norm.patcher.norm_recognition import Recognised, recognise
from fused_norm.patcher.probe import UnrecognisedError
from fused_norm.patcher.running_code import RunningCode

_meanings: WeakKeyDictionary[nn.Module, tuple[type, RunningCode, Recognised | None]] = WeakKeyDictionary()
"""The class, the code and the formula of each module; the formula is None if it is not known."""


class RMSNorm(nn.Module):
    """A forward for any module that computes an RMSNorm with one weight and an eps, or without a weight.

    It has no state: ``kernelize`` binds its forward to modules of a model, which keep their own parameters. What such a
    module computes is found out by its values at the first call, so the rounding points are those of its class. If
    that is no known formula, if kernels cannot run, and in compiled graphs, its own class's forward runs.
    """

    can_torch_compile = False
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        meaning = None if torch.compiler.is_compiling() else _meaning_of(self)
        if meaning is not None:
            known = meaning.spec
            eps = getattr(self, meaning.eps_name)
            spec = None if check_eps(eps) else norm_spec(known.casting, known.zero_centered, eps, known.casts_weight)
            weight = self.weight if known.weighted else None
            y, reason = RMS_NORM.try_fused(hidden_states, weight, spec, None)
            if reason is None:
                return y
        return type(self).forward(self, hidden_states)


def _meaning_of(module: nn.Module) -> Recognised | None:
    """Return the spec that a module's class computes with its attributes; None if that is not known."""
    kind = type(module)
    known = _meanings.get(module)
    if known is None or known[0] is not kind or not known[1].is_in(kind.forward):
        try:
            meaning = recognise(module)
        except UnrecognisedError:
            meaning = None
        known = _meanings[module] = kind, RunningCode(kind.forward), meaning
    return known[2]
