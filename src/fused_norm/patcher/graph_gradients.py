"""The gradients of a layer's graph: one for each use of a tensor, and copies of them outside of the graphs' memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

_FLAT = 4 * 2**20
"""Bytes up to which the gradients of a layer's parameters leave the pool as one tensor."""


class Uses:
    """Where a layer's computation uses the tensors that it is to be differentiated by.

    A tensor that is used several times has several gradients, which autograd adds to those of its uses elsewhere one by
    one: their sum would be another sum in the last place.

    The results themselves are not held, only their places in autograd's graph.

    Attributes:
        repeated: the places of leaves with several uses, once for each further use.
    """

    def __init__(self, results: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        self._leaves = leaves
        self._results = [get_gradient_edge(result) if result.requires_grad else None for result in results]
        self._nodes: dict[Any, list[tuple[int, int]]] = {}
        """The leaves, and the numbers of the gradients, that nodes give, for those of several uses."""
        nodes = [leaf.grad_fn or get_gradient_edge(leaf).node for leaf in leaves]
        place_of = {(node, leaf.output_nr): place for place, (node, leaf) in enumerate(zip(nodes, leaves, strict=True))}
        waiting: list[Any] = [result.grad_fn for result in results if result.grad_fn is not None]
        seen, number = set(waiting), [0] * len(leaves)
        while waiting:
            node = waiting.pop()
            for position, edge in enumerate(node.next_functions):
                place = place_of.get(edge)
                if place is not None:
                    number[place] += 1
                    self._nodes.setdefault(node, []).append((place, position))
                elif edge[0] is not None and edge[0] not in seen:
                    seen.add(edge[0])
                    waiting.append(edge[0])
        self.repeated = [place for place, count in enumerate(number) for _ in range(count - 1)]
        several = set(self.repeated)
        self._nodes = {
            node: gives
            for node, pairs in self._nodes.items()
            if (gives := [(place, position) for place, position in pairs if place in several])
        }

    @property
    def are_differentiable(self) -> list[bool]:
        """Whether each result has a gradient."""
        return [result is not None for result in self._results]

    def gradients(self, grads: Sequence[Tensor | None], **how: bool) -> list[Tensor | None]:
        """The gradients of the leaves, one of each, and after them those of ``repeated``.

        ``grads``: those of the results. ``how``: ``retain_graph`` or ``create_graph``.
        """
        pairs = [(r, g) for r, g in zip(self._results, grads, strict=True) if g is not None and r is not None]
        if not pairs:
            return [None] * (len(self._leaves) + len(self.repeated))
        of_uses: list[list[Tensor | None]] = [[] for _ in self._leaves]

        def take(gives: list[tuple[int, int]], given: Sequence[Tensor | None], _: Any) -> None:
            for place, position in gives:
                of_uses[place].append(given[position])

        hooks = [node.register_hook(partial(take, gives)) for node, gives in self._nodes.items()]
        try:
            outputs, of_outputs = zip(*pairs, strict=True)
            sums = torch.autograd.grad(outputs, self._leaves, of_outputs, allow_unused=True, **how)
        finally:
            for hook in hooks:
                hook.remove()
        further: list[Tensor | None] = []
        for place in self.repeated:
            uses = of_uses[place]
            further.append(uses.pop(1) if len(uses) > 1 else None)
        return [*(uses[0] if uses else total for uses, total in zip(of_uses, sums, strict=True)), *further]


def copies_of(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """New tensors with the values of these; those of one dtype by one kernel: x * 1 has the bits of x."""
    copies: list[Tensor | None] = list(tensors)
    places: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor is not None:
            places.setdefault(tensor.dtype, []).append(place)
    for of_dtype in places.values():
        grads: Any = [tensors[place] for place in of_dtype]
        results = torch._foreach_mul(grads, 1) if len(grads) > 1 else [grads[0].clone()]
        for place, copy in zip(of_dtype, results, strict=True):
            copies[place] = copy
    return copies


class FlatGrads(NamedTuple):
    """Small gradients of a layer's parameters, one after the other in one tensor.

    Attributes:
        places: theirs among all gradients.
        forms: tensors of their shapes, without memory.
        grads: all of them, flat.
    """

    places: list[int]
    forms: list[Tensor]
    grads: Tensor

    def copies(self) -> Sequence[Tensor]:
        """The gradients as parts of one new tensor."""
        parts: Sequence[Tensor] = torch._C._nn.unflatten_dense_tensors(self.grads.clone(), self.forms)
        return parts


def flattened(grads: list[Tensor | None], first: int) -> tuple[list[Tensor | None], list[FlatGrads]]:
    """Gradients without the small ones from the first parameter's on, and these, flat."""
    of_dtypes: dict[torch.dtype, list[int]] = {}
    for place, grad in enumerate(grads):
        if place >= first and grad is not None:
            of_dtypes.setdefault(grad.dtype, []).append(place)
    rest, flat = list(grads), []
    for places in of_dtypes.values():
        members: Any = [grads[place] for place in places]
        if len(members) > 1 and sum(grad.numel() * grad.element_size() for grad in members) <= _FLAT:
            forms = [torch.empty(grad.shape, device="meta") for grad in members]
            flat.append(FlatGrads(places, forms, torch._C._nn.flatten_dense_tensors(members)))
            for place in places:
                rest[place] = None
    return rest, flat
