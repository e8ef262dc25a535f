"""Registers operators with PyTorch, so that compilers and dispatch modes see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_NAMESPACE = __name__.partition(".")[0]
"""The namespace of the registered operators: the name of this package, or of a copy of it under another name."""

_library = torch.library.Library(_NAMESPACE, "DEF")


def define(name: str, schemas: Sequence[str], results: Sequence[str], run: Callable[..., Any]) -> Callable[..., Any]:
    """Register an operator and return it; ``run(is_traced, ...)`` runs it or only allocates its outputs.

    Operators carry no autograd rule: an ``autograd.Function`` outside of them is the cheapest on the host.
    """
    returned = "Tensor" if len(results) == 1 else f"({', '.join(f'Tensor {result}' for result in results)})"
    before, spec, after = ", ".join(filter(None, schemas)).partition("NormSpec spec, ")
    fields = "str casting, bool zero_centered, float eps, bool casts_weight, " if spec else ""
    _library.define(f"{name}({fields}{before}{after}) -> {returned}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, lambda *arguments: run(False, *arguments), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", lambda *arguments: run(True, *arguments), lib=_library)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


def filled(results: Sequence[Tensor | None], like: Tensor) -> Any:
    """The results of a registered operator, with empty tensors for absent ones: a schema has no optional results."""
    results = [like.new_empty(0, dtype=torch.float32) if result is None else result for result in results]
    return results[0] if len(results) == 1 else tuple(results)


def names_of(schema: str) -> list[str]:
    """The names in a schema, in their order."""
    return [part.split()[-1] for part in schema.split(",")] if schema else []
