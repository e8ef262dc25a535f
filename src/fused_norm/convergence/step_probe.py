"""The insides of one step: the outputs of layers, their gradients, and each norm on the stock run's own inputs.

A loss says that something is wrong, long after. The outputs of layers say where it began, and a norm that is called on
equal inputs says how it rounds: a wrong cast changes a quarter of the outputs of a norm in bf16, and hardly the loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .model_recipe import layers_of
from .run_record import NormRerun, share_unequal, snapshot

ROWS = 32
"""Positions of the first sequence that a norm is called on again."""


@dataclass(frozen=True)
class StepProbe:
    """The tensors kept of one forward and backward pass.

    Attributes:
        outputs: of each layer, in order, and the logits.
        output_gradients: of the loss with respect to them, from the last to the first.
        norms: input of each norm that was asked for, and gradient of its output, for ``ROWS`` positions.
    """

    outputs: Mapping[str, Tensor]
    output_gradients: Mapping[str, Tensor]
    norms: Mapping[str, tuple[Tensor, Tensor]]


def probe_step(model: nn.Module, tokens: Tensor, norms: Iterable[str] = (), *, mixed: bool = False) -> StepProbe:
    """Run a forward and backward pass and keep what it computes; the model is left without gradients.

    Args:
        model: a causal language model, neither wrapped nor sharded.
        tokens: [batch, sequence] of token ids, on the model's device.
        norms: paths of norms to keep inputs and gradients of. A hook on a norm keeps its residual add from being fused,
            so this is for a stock model only.
        mixed: under bf16 autocast.
    """
    outputs: dict[str, Tensor] = {}
    inputs_of: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(path: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            outputs[path] = _retained(output[0] if isinstance(output, tuple) else output)

        return hook

    def keep_norm(path: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            inputs_of[path] = inputs[0], _retained(output)

        return hook

    with contextlib.ExitStack() as hooks:
        for path, layer in layers_of(model).items():
            hooks.callback(layer.register_forward_hook(keep(path)).remove)
        for path in norms:
            hooks.callback(model.get_submodule(path).register_forward_hook(keep_norm(path)).remove)
        with _autocast(tokens.device, mixed):
            result: Any = model(input_ids=tokens, labels=tokens, use_cache=False)
        outputs["logits"] = _retained(result.logits)
        result.loss.backward()
    model.zero_grad(set_to_none=True)
    return StepProbe(
        outputs={path: snapshot(output) for path, output in outputs.items()},
        output_gradients={path: _gradient(output) for path, output in reversed(outputs.items())},
        norms={path: (_rows(x), _rows(y.grad)) for path, (x, y) in inputs_of.items() if y.grad is not None},
    )


def rerun_norms(
    model: nn.Module, norms: Mapping[str, tuple[Tensor, Tensor]], *, mixed: bool = False
) -> Iterator[tuple[str, NormRerun]]:
    """Call norms of ``model`` on what a stock run handed to them, forward and backward.

    Args:
        model: neither wrapped nor sharded.
        norms: input and gradient of the output, by the norm's path.
        mixed: under bf16 autocast.
    """
    for path, (stock_x, dy) in norms.items():
        norm = model.get_submodule(path)
        weight = next((p for p in norm.parameters() if p.requires_grad), None)
        x = stock_x.clone().requires_grad_()
        with _autocast(x.device, mixed):
            y = norm(x)
        handed = dy.to(y.dtype, copy=True)
        dx, *dw = torch.autograd.grad(
            y, [x] if weight is None else [x, weight], handed, allow_unused=True, materialize_grads=True
        )
        yield (
            path,
            NormRerun(
                x=stock_x.cpu(),
                dy=dy.cpu(),
                y=y.detach().cpu(),
                dx=snapshot(dx),
                dw=snapshot(dw[0]) if dw else None,
                overwritten=share_unequal(handed, dy.to(y.dtype)),
                made_by=type(y.grad_fn).__name__,
            ),
        )


def _retained(output: Tensor) -> Tensor:
    if output.requires_grad:
        output.retain_grad()
    return output


def _gradient(output: Tensor) -> Tensor:
    return snapshot(torch.zeros_like(output) if output.grad is None else output.grad)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.detach()[:1, :ROWS].clone()


def _autocast(device: torch.device, mixed: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16, enabled=mixed)
