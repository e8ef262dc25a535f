"""The insides of one step: the outputs of layers, their gradients, and what the norms are given.

A loss says that something is wrong, long after. The outputs of layers say where it began.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .model_source import layers_of
from .run_record import snapshot


@dataclass(frozen=True)
class StepProbe:
    """The tensors kept of one forward and backward pass.

    Attributes:
        outputs: of each layer, in order, and the logits.
        output_gradients: of the loss with respect to them, from the last to the first.
    """

    outputs: Mapping[str, Tensor]
    output_gradients: Mapping[str, Tensor]


def probe_step(model: nn.Module, tokens: Tensor, *, mixed: bool = False) -> StepProbe:
    """Run a forward and backward pass and keep what it computes; the model is left without gradients.

    Args:
        model: a causal language model, neither wrapped nor sharded.
        tokens: [batch, sequence] of token ids, on the model's device.
        mixed: under bf16 autocast.
    """
    outputs: dict[str, Tensor] = {}

    def keep(path: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            outputs[path] = _retained(output[0] if isinstance(output, tuple) else output)

        return hook

    with contextlib.ExitStack() as hooks:
        for path, layer in layers_of(model).items():
            hooks.callback(layer.register_forward_hook(keep(path)).remove)
        with autocast(tokens.device, mixed):
            result: Any = model(input_ids=tokens, labels=tokens, use_cache=False)
        outputs["logits"] = _retained(result.logits)
        result.loss.backward()
    model.zero_grad(set_to_none=True)
    return StepProbe(
        outputs={path: snapshot(output) for path, output in outputs.items()},
        output_gradients={path: _gradient(output) for path, output in reversed(outputs.items())},
    )


def autocast(device: torch.device, mixed: bool) -> contextlib.AbstractContextManager[Any]:
    """bf16 autocast on ``device`` if ``mixed``."""
    return torch.autocast(device.type, torch.bfloat16, enabled=mixed)


def _retained(output: Tensor) -> Tensor:
    if output.requires_grad:
        output.retain_grad()
    return output


def _gradient(output: Tensor) -> Tensor:
    return snapshot(torch.zeros_like(output) if output.grad is None else output.grad)
