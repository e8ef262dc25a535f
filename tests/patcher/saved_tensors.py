"""The tensors that autograd has saved in a graph, and the recipes for those that it recomputes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fused_norm.patcher.recompute_linears import Recipe


def saved_in(graph: Any) -> Iterator[Any]:
    """Yield everything that autograd has saved in a node's graph, as it was packed."""
    nodes, seen = [graph], {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        for name in dir(node):
            saved = getattr(node, name) if name.startswith("_raw_saved") else ()
            for packed in saved if isinstance(saved, (tuple, list)) else (saved,):
                if packed.data is not None:
                    yield packed.data


def recomputed_in(graph: Any) -> list[Any]:
    """Return the calls whose outputs are recomputed, once for each of their tensors that a node would have saved."""
    return [packed.value.func.__self__ for packed in saved_in(graph) if type(packed) is Recipe]


def saved_bytes(graph: Any) -> int:
    """Return the bytes of all memory that autograd keeps for a node's graph."""
    sizes = {}
    for packed in saved_in(graph):
        for tensor in packed.reads if type(packed) is Recipe else (getattr(packed, "tensor", packed),):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(sizes.values())
