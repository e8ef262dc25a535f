"""The product with the scale of a LoRA layer, found in the source of PEFT's forward, and left to ``fused_norm_scaled``.

    result = result + second(first(dropout(x))) * scale

becomes ``result = result + self.fused_norm_scaled(second, first(dropout(x)), scale)``, whatever the names are.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from typing import Any

from ..source import SourceError, compiled, source_of
from .calls import make_call, replace


def scaled_by_own_method(origin: Any) -> Callable[..., Any] | None:
    """The forward of a LoRA layer's class with that product rewritten; None where there is none, or several."""
    try:
        source = source_of(origin)
        definition = copy.deepcopy(source.definition)
        found = [(statement, *one) for statement in definition.body for one in _scaled_in(statement)]
        if len(found) != 1:
            return None
        ((statement, product, arguments),) = found
        replace(statement, product, make_call(source.own, "fused_norm_scaled", arguments))
        return compiled(definition, origin)
    except SourceError:
        return None


def _scaled_in(statement: ast.stmt) -> list[tuple[ast.expr, list[ast.expr]]]:
    """The products ``second(first(...)) * scale`` of names in a statement, with ``second, first(...), scale``."""
    found: list[tuple[ast.expr, list[ast.expr]]] = []
    for node in ast.walk(statement):
        match node:
            case ast.BinOp(ast.Call(ast.Name() as second, [ast.Call() as x], []), ast.Mult(), ast.Name() as scale):
                if isinstance(x.func, ast.Name):
                    found.append((node, [second, x, scale]))
    return found
