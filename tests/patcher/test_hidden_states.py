"""Gradients at hidden states are those of stock: of all that comes after a hidden state, however it is reached."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from .models import relative, tokens, twins


def forward(model: nn.Module, ids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss, and the hidden states: the embeddings, the output of each layer but the last, and the final norm's."""
    output = model(input_ids=ids, labels=ids, output_hidden_states=True, use_cache=False)
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    return output.loss, output.hidden_states


def by_autograd_grad(model: nn.Module, ids: Tensor) -> list[Tensor]:
    loss, hidden_states = forward(model, ids)
    return [torch.autograd.grad(loss, state, retain_graph=True)[0] for state in hidden_states]


def by_tensor_hooks(model: nn.Module, ids: Tensor) -> list[Tensor]:
    loss, hidden_states = forward(model, ids)
    seen: dict[int, Tensor] = {}
    for index, state in enumerate(hidden_states):
        state.register_hook(lambda gradient, index=index: seen.__setitem__(index, gradient.clone()))
    loss.backward()
    return [seen[index] for index in range(len(hidden_states))]


def layer_by_layer(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The residual stream before the first layer, after each layer, and after the norm, from a loop written by hand."""
    decoder = model.model
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    stream = decoder.embed_tokens(ids)
    states = [stream]
    for layer in decoder.layers:
        stream = layer(stream, attention_mask=None, position_embeddings=decoder.rotary_emb(stream, positions))
        stream = stream[0] if isinstance(stream, tuple) else stream  # Gemma 2 returns it in transformers 4
        states.append(stream)
    states.append(decoder.norm(stream))
    return states


def in_a_loop_by_hand(model: nn.Module, ids: Tensor) -> list[Tensor]:
    states = layer_by_layer(model, ids)
    return list(torch.autograd.grad(model.lm_head(states[-1]).square().mean(), states))


@pytest.mark.parametrize(
    ("gradients", "model_type", "dtype", "bound"),
    [
        (by_autograd_grad, "gemma2", torch.float32, 1e-5),
        (by_autograd_grad, "qwen3", torch.bfloat16, 2**-5),
        (in_a_loop_by_hand, "qwen3", torch.float32, 1e-5),
        (by_tensor_hooks, "qwen3", torch.float32, 1e-5),
    ],
)
def test_a_gradient_at_a_hidden_state_is_that_of_stock(
    gradients: Callable[[nn.Module, Tensor], list[Tensor]],
    model_type: str,
    dtype: torch.dtype,
    bound: float,
    device: str,
) -> None:
    stock, fused = twins(model_type, device, dtype=dtype)
    ids = tokens(device)
    expected, actual = gradients(stock, ids), gradients(fused, ids)
    assert len(actual) == len(expected) > stock.config.num_hidden_layers
    for index, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert theirs.count_nonzero() > 0
        assert relative(mine, theirs) < bound, index


@pytest.mark.parametrize("reach", [lambda model, ids: forward(model, ids)[1], layer_by_layer])
def test_a_hook_that_zeroes_the_gradient_of_a_hidden_state_stops_it(
    reach: Callable[[nn.Module, Tensor], list[Tensor]], device: str
) -> None:
    stock, fused = twins("gemma2", device)
    ids = tokens(device)
    gradients = []
    for model in (stock, fused):
        states = reach(model, ids)
        states[1].register_hook(torch.zeros_like)
        model.lm_head(states[-1]).square().mean().backward()
        first, second = model.model.layers[:2]
        assert all(parameter.grad.count_nonzero() == 0 for parameter in first.parameters())
        assert all(parameter.grad.count_nonzero() > 0 for parameter in second.parameters())
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.model.layers.parameters()]))
    assert relative(*reversed(gradients)) < 1e-5
