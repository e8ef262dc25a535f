"""Patched models have stock's results under other kinds of differentiation than training's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from .models import loss_of, relative, slow, tokens, twins


def hessian_vector_product(model: nn.Module, ids: Tensor) -> list[Tensor]:
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss_of(model, ids), parameters, create_graph=True)
    return list(torch.autograd.grad(sum(grad.sin().sum() for grad in first), parameters))


def gradients_in_a_batch(model: nn.Module, ids: Tensor) -> list[Tensor]:
    parameters = list(model.parameters())
    losses = torch.stack([loss_of(model, ids), loss_of(model, ids.flip(1))])
    return list(torch.autograd.grad(losses, parameters, torch.eye(2, device=ids.device), is_grads_batched=True))


def per_sample_gradients(model: nn.Module, ids: Tensor) -> list[Tensor]:
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        logits = functional_call(model, parameters, (), {"input_ids": row[None], "use_cache": False}).logits
        return nn.functional.cross_entropy(logits[0, :-1], row[1:])

    return list(torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, ids).values())


def directional_derivative(model: nn.Module, ids: Tensor) -> list[Tensor]:
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(model, parameters, (), {"input_ids": ids, "labels": ids, "use_cache": False}).loss

    return list(torch.func.jvp(loss, (parameters,), (parameters,)))


@pytest.mark.parametrize(
    "derive",
    [hessian_vector_product, gradients_in_a_batch, per_sample_gradients, directional_derivative],
)
@pytest.mark.parametrize("model_type", ["qwen3", slow("gemma2")])
def test_derivatives_are_those_of_stock(
    model_type: str, derive: Callable[[nn.Module, Tensor], list[Tensor]], device: str
) -> None:
    stock, fused = twins(model_type, device=device)
    for model in (stock, fused):
        model.set_attn_implementation("eager")
    ids = tokens(device, length=7)
    for ours, expected in zip(derive(fused, ids), derive(stock, ids), strict=True):
        assert relative(ours, expected) < 1e-4
