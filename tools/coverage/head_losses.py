"""The losses of language models, seen as they run: whose logits a cross entropy takes, and what is fused of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fused_norm.kernels.operator import Operator, calls

from .inputs import Inputs, inputs_of


class CrossEntropies(TorchFunctionMode):
    """A context that notes the numbers of classes of all cross entropies that are computed in it."""

    def __init__(self) -> None:
        super().__init__()
        self.classes: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.cross_entropy:
            self.classes.append(args[0].shape[-1])
        return func(*args, **(kwargs or {}))


class _Operators(list[str]):
    """Notes the names of the operators that are called."""

    def called(self, operator: Operator, arguments: tuple[Any, ...]) -> Any:
        self.append(operator.name)
        return operator.results_of(*arguments)


def inputs_with_labels(model: Any) -> Inputs | None:
    """Inputs with which a model computes the cross entropy of what its head returns; None for a model that does not."""
    head = model.get_output_embeddings()
    classes = getattr(head, "out_features", None) or getattr(getattr(head, "weight", None), "shape", (0,))[0]
    for inputs in inputs_of(model):
        tokens = inputs.get("decoder_input_ids", inputs.get("input_ids"))
        if not isinstance(tokens, Tensor) or tokens.dim() != 2:
            continue
        inputs["labels"] = tokens.clone()
        try:
            with torch.no_grad(), CrossEntropies() as seen:
                model(**inputs)
        except Exception:  # of whatever kind a foreign model raises
            continue
        return inputs if classes in seen.classes else None
    return None


def is_fused(model: nn.Module, inputs: Inputs) -> bool:
    """Return whether a patched model computes the loss of these inputs by the fused operator."""
    seen = _Operators()
    with torch.no_grad(), calls.by(seen):
        model(**inputs)
    return "linear_cross_entropy" in seen
