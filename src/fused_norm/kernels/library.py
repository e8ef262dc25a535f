"""Registration of operators under ``torch.ops.fused_norm``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("fused_norm", "DEF")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Registers an operator by its schema and returns it: ``run`` launches it, ``fake`` only allocates its outputs.

    Operators carry no autograd rule: an ``autograd.Function`` outside of them is the cheapest on the host.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fused_norm::{name}", fake, lib=_library)
    return getattr(torch.ops.fused_norm, name).default
