"""Patched models with unsupported settings and tensors do what stock does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fused_norm

from .models import assert_gradients_near, assert_trains_as_stock, gradients_of, relative, tokens, twins


def norms(device: str) -> tuple[nn.RMSNorm, nn.RMSNorm]:
    """Return a stock norm with random weights, and its fused copy."""
    stock = nn.RMSNorm(8, eps=1e-5, device=device)
    nn.init.normal_(stock.weight, 1.0, 0.5)
    fused = copy.deepcopy(stock)
    fused_norm.apply_fused_norm(nn.ModuleList([fused]))
    return stock, fused


@pytest.mark.parametrize("eps", [None, float("nan"), -1.0])
def test_an_eps_that_kernels_do_not_take_is_stocks_at_every_call(eps: float | None, device: str) -> None:
    stock, fused = norms(device)
    x = torch.randn(3, 8, device=device)
    stock.eps = fused.eps = eps
    for _ in range(2):
        torch.testing.assert_close(fused(x), stock(x), rtol=0, atol=0, equal_nan=True)


def test_an_eps_that_became_a_parameter_gets_its_gradient(device: str) -> None:
    """The value stays the same, so a kernel would know it."""
    gradients = []
    for model in twins("llama", device):
        model(tokens(device), labels=tokens(device)).loss.backward()
        norms = model.model.layers[0].post_attention_layernorm, model.model.norm
        for norm in norms:
            value = norm.variance_epsilon
            del norm.variance_epsilon
            norm.variance_epsilon = nn.Parameter(torch.tensor(value, device=device))
        model(tokens(device), labels=tokens(device)).loss.backward()
        gradients.append([norm.variance_epsilon.grad for norm in norms])
    for theirs, mine in zip(*gradients, strict=True):
        assert theirs.abs() > 0
        assert relative(mine, theirs) < 1e-4


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])
def test_inputs_made_in_inference_mode_train_as_in_stock(model_type: str, device: str) -> None:
    stock, fused = twins(model_type, device)
    with torch.inference_mode():
        embeds = torch.randn(2, 6, 72, device=device)
    losses = []
    for model in (stock, fused):
        loss = model(inputs_embeds=embeds, use_cache=False).logits.square().mean()
        loss.backward()
        losses.append(loss)
    assert relative(losses[1], losses[0]) < 1e-5
    assert_gradients_near(gradients_of(fused), gradients_of(stock), 1e-4)


class Doubling(Tensor):
    """A weight that doubles its products and casts."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(Tensor) * 2 if func.__name__ in ("mul", "__mul__", "__rmul__", "float") else result


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])
def test_a_norms_weight_of_another_class_computes_as_in_stock(model_type: str, device: str) -> None:
    """Each norm of a layer is changed in turn, after calls in which its weight was plain."""
    stock, fused = twins(model_type, device)
    ids = tokens(device, batch=1, length=3)
    names = [name for name, module in stock.model.layers[0].named_modules() if name.endswith("norm")]
    assert len(names) == 4
    with torch.no_grad():
        expected = stock(ids).logits
        assert relative(fused(ids).logits, expected) < 1e-5
        for name in names:
            norms = [model.model.layers[0].get_submodule(name) for model in (stock, fused)]
            weight = norms[0].weight
            for norm in norms:
                norm.weight = nn.Parameter(weight.detach().as_subclass(Doubling), requires_grad=False)
            stock_logits, fused_logits = stock(ids).logits, fused(ids).logits
            assert relative(fused_logits, stock_logits) < 1e-5, name
            assert relative(stock_logits, expected) > 1e-3, name
            for norm in norms:
                norm.weight = weight


def test_frozen_keys_beside_trained_queries_want_no_gradient(device: str) -> None:
    stock, fused = twins("qwen3", device)
    for model in (stock, fused):
        for layer in model.model.layers:
            layer.self_attn.k_proj.requires_grad_(False)
            layer.self_attn.k_norm.requires_grad_(False)
    assert_trains_as_stock(stock, fused, tokens(device))
    attention = fused.model.layers[0].self_attn
    q, k = (torch.randn(2, heads, 5, 24, device=device) for heads in (4, 2))
    q_out, k_out = attention.fused_norm_pair(attention.q_norm, attention.k_norm, q, k)
    assert (q_out.requires_grad, k_out.requires_grad) == (True, False)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # whatever stock code raises
        return type(error)


ODD: dict[str, Callable[[Tensor], Any]] = {
    "a list": Tensor.tolist,
    "a float": lambda x: 1.0,
    "sparse": Tensor.to_sparse,
    "jagged": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
    "integers": Tensor.long,
    "zeros without memory": lambda x: torch._efficientzerotensor(x.shape, device=x.device),
    "no dimension": lambda x: x[0, 0],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sort", ODD)
def test_a_fused_norm_or_gate_does_with_odd_values_what_stock_does(sort: str, device: str) -> None:
    stock, fused = norms(device)
    mlp = twins("llama", device)[1].model.layers[0].mlp
    x = torch.randn(3, 8, device=device)
    odd = ODD[sort](x)

    def gate(fuses: bool) -> Any:
        return mlp.fused_norm_gate("silu", mlp.act_fn, gate=odd, up=x) if fuses else mlp.act_fn(odd) * x

    for mine, theirs in (
        (outcome(lambda: fused(odd)), outcome(lambda: stock(odd))),
        (outcome(lambda: fused(x, odd)[1]), outcome(lambda: odd + x)),
        (outcome(lambda: gate(True)), outcome(lambda: gate(False))),
    ):
        assert type(mine) is type(theirs)
        if isinstance(theirs, Tensor) and not theirs.is_nested:
            torch.testing.assert_close(mine, theirs)
        elif not isinstance(theirs, Tensor):
            assert mine is theirs
