"""Records the outputs of a model's layers in a step, and the gradients of these outputs.

A loss tells late that something is wrong; they tell where.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..model_configs.layers import layers_of


def layer_tensors(
    model: nn.Module, tokens: Tensor, *, mixed: bool = False, loss_of: Callable[..., Tensor] | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run a forward and backward pass and keep what it computes; the model is left without gradients.

    Args:
        model: a causal language model, neither wrapped nor sharded.
        tokens: [batch, sequence] of token ids, on the model's device.
        mixed: under bf16 autocast.
        loss_of: computes the loss; that of the model when None.

    Returns:
        The outputs of each layer, in order, and the logits if the model computes the loss; the gradients of the loss
        with respect to them, last first.
    """
    outputs: dict[str, Tensor] = {}

    def keep(path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        outputs[path] = output[0] if isinstance(output, tuple) else output
        if outputs[path].requires_grad:
            outputs[path].retain_grad()

    with contextlib.ExitStack() as hooks:
        for path, layer in layers_of(model).items():
            hooks.callback(layer.register_forward_hook(partial(keep, path)).remove)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=mixed):
            if loss_of is None:
                result: Any = model(input_ids=tokens, labels=tokens, use_cache=False)
                keep("logits", model, tokens, result.logits)
            loss: Tensor = result.loss if loss_of is None else loss_of(model, tokens, tokens)
        loss.backward()
    model.zero_grad(set_to_none=True)
    backward = reversed(outputs.items())
    gradients = {path: torch.zeros_like(output) if output.grad is None else output.grad for path, output in backward}
    return (
        {path: snapshot(output) for path, output in outputs.items()},
        {path: snapshot(gradient) for path, gradient in gradients.items()},
    )


def snapshot(tensor: Tensor) -> Tensor:
    """A copy on the CPU in fp32, of the whole of a sharded tensor; every process has to ask for it."""
    whole = getattr(tensor, "full_tensor", lambda: tensor)()
    return whole.detach().to("cpu", torch.float32, copy=True)
