"""The end of a language model's forward, tried on a few lazy logits: what it does to the logits of its head.

It runs on the meta device in a replica of the model. What leads to the head runs, and so do modules without parameters,
such as losses; any other module gives hidden states without a look at its arguments.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .class_swap import stock_class
from .lazy_logits import LazyLogits, LazySum, Projection
from .probe import UnrecognisedError, cpu_replica, own_attributes, plain_pytorch, process_state_kept


class _Outputs:
    """The output of a base model in a trial: hidden states under each of their names, and None for all else."""

    def __init__(self, hidden: Tensor) -> None:
        self._hidden = hidden

    def __getattr__(self, name: str) -> Any:
        return self._hidden if name in ("last_hidden_state", "pooler_output") else None

    def __getitem__(self, index: Any) -> Any:
        return (self._hidden, self._hidden)[index]


def trial_of(model: Any, head: Any) -> Trial:
    """A trial that was run, of hidden states as wide as the head's weight or as the model.

    Raises:
        UnrecognisedError: if the forward cannot be called in this way.
    """
    first = Trial(model, head, head.in_features)
    try:
        first.run()
    except UnrecognisedError:
        width = getattr(getattr(model, "config", None), "hidden_size", None)
        if type(width) is not int or width == first.width:
            raise
        first = Trial(model, head, width)
        first.run()
    return first


@dataclass
class Trial:
    """A trial of the forward of ``model`` with labels, and what was seen in it.

    Attributes:
        width: of hidden states.
        is_called: the head was.
        reader: the first one of the logits before a loss, or None.
        has_loss: a cross entropy of lazy logits was computed.
    """

    model: nn.Module
    head: Any
    width: int
    is_called: bool = False
    reader: str | None = None
    has_loss: bool = False
    _replicas: dict[int, tuple[nn.Module, bool]] = field(default_factory=dict)

    def run(self) -> None:
        """Call the forward.

        Raises:
            UnrecognisedError: if it cannot be called in this way.
        """
        with plain_pytorch(), torch.device("meta"), process_state_kept():
            try:
                replica, leads_to_head = self._replica(self.model)
                if not leads_to_head:
                    raise LookupError(type(self.head).__name__)
                ids = torch.zeros(2, 3, dtype=torch.int64)
                main = next(iter(inspect.signature(replica.forward).parameters))
                output = replica(**{main: ids if main == "input_ids" else self._hidden()}, labels=ids)
                for value in tree_leaves(output):
                    if isinstance(value, LazySum):
                        value.read("the model")
            except Exception as error:  # foreign code may raise anything
                raise UnrecognisedError(f"{type(error).__name__}: {error}") from error

    def _replica(self, module: nn.Module) -> tuple[nn.Module, bool]:
        """A module of the same class with tensors on the meta device, and whether the head is in it."""
        if id(module) in self._replicas:
            return self._replicas[id(module)]
        replica: Any = cpu_replica(stock_class(module), own_attributes(module))
        leads_to_head = module is self.head
        self._replicas[id(module)] = replica, leads_to_head
        for tensors, copies in ((module._parameters, replica._parameters), (module._buffers, replica._buffers)):
            for name, value in tensors.items():
                copies[name] = None if value is None else torch.empty(tuple(value.shape), dtype=value.dtype)
        if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):  # layers, which nobody calls here
            for name, child in module._modules.items():
                copy, is_on_path = (None, False) if child is None else self._replica(child)
                replica._modules[name] = copy
                leads_to_head |= is_on_path
        self._replicas[id(module)] = replica, leads_to_head
        if module is self.head:
            vars(replica)["forward"] = self._logits
        elif not leads_to_head and next(module.parameters(), None) is not None:
            hidden = self._hidden()
            result = _Outputs(hidden) if hasattr(module, "get_input_embeddings") else hidden
            vars(replica)["forward"] = lambda *_, **__: result
        return replica, leads_to_head

    def _hidden(self) -> Tensor:
        return torch.empty(2, 3, self.width, dtype=self.head.weight.dtype)

    def _logits(self, x: Tensor) -> Tensor:
        self.is_called = True
        head: Any = self._replicas[id(self.head)][0]
        return LazyLogits.from_projection(Projection(x, head.weight, head.bias, None, self._loss, self._noted))

    def _loss(self, *_: Any) -> Tensor:
        self.has_loss = True
        return torch.zeros(())

    def _noted(self, reader: str) -> None:
        if not self.has_loss and self.reader is None:
            self.reader = reader
