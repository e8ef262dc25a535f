"""What autograd has saved in a graph: tensors, and recipes for those that are recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fused_norm.patcher.recompute_linears import Kept, Recipe


def saved_in(graph: Any) -> Iterator[Any]:
    """What autograd has saved behind a node, as it was packed."""
    nodes, seen = [graph], {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        for name in dir(node):
            saved = getattr(node, name) if name.startswith("_raw_saved") else ()
            for one in saved if isinstance(saved, (tuple, list)) else (saved,):
                if one.data is not None:
                    yield one.data


def recomputed_in(graph: Any) -> list[Any]:
    """The calls whose outputs are recomputed, once for each tensor that a node would have saved of them."""
    return [one.value.func.__self__ for one in saved_in(graph) if type(one) is Recipe]


def saved_bytes(graph: Any) -> int:
    """The bytes of all memory that autograd keeps behind a node."""
    sizes = {}
    for one in saved_in(graph):
        for tensor in one.reads if type(one) is Recipe else (one.tensor if type(one) is Kept else one,):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(sizes.values())
