"""What people do with ``outputs.logits`` of a model that was given labels, compared with the stock model."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils import dlpack
from torch.utils.checkpoint import checkpoint

import fused_norm
from fused_norm.model_configs import build
from fused_norm.patcher import fused_norm_module

from .models import ScaledGradient, tokens


def batch(model: Any) -> Tensor:
    return tokens(model.device.type, length=9)


def call(model: Any) -> Any:
    return model(input_ids=batch(model), labels=batch(model), use_cache=False)


def entropy(logits: Tensor, **options: Any) -> Tensor:
    rows = logits if logits.dim() == 2 else logits.reshape(-1, logits.shape[-1])
    return functional.cross_entropy(rows, torch.arange(len(rows), device=rows.device), **options)


def gradients(model: nn.Module, loss: Tensor, *leaves: Any) -> list[Any]:
    """The loss, and the gradients of it; None for a parameter without one."""
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves), *(parameter.grad for parameter in model.parameters())]


def of_a_leaf(model: Any, make: Callable[[Tensor], Tensor], *, no_grad: bool = False) -> list[Any]:
    with torch.set_grad_enabled(not no_grad):
        logits = call(model).logits
    leaf = make(logits)
    leaf.requires_grad = True
    return gradients(model, entropy(leaf), leaf)


def of_a_checkpoint(model: Any) -> list[Any]:
    def cut(embeddings: Tensor) -> Tensor:
        return model(inputs_embeds=embeddings, labels=batch(model), use_cache=False).logits[:, :-1]

    return gradients(model, entropy(checkpoint(cut, model.get_input_embeddings()(batch(model)), use_reentrant=True)))


def kept_over_a_step(model: Any, keep: Callable[[Tensor], Tensor]) -> list[Tensor]:
    output = call(model)
    kept = keep(output.logits)
    output.loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    return [kept.detach()]


@torch.no_grad()
def with_a_buffer_of_labels(model: Any) -> list[Tensor]:
    rows = call(model).logits.flatten(0, 1)
    labels = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    total = functional.cross_entropy(rows, labels, reduction="sum")
    labels.fill_(7)
    return [total + 0]


def with_a_gradient_of_them(model: Any, *, is_read: bool) -> list[Any]:
    output = call(model)
    logits, hooked = output.logits, []
    if is_read:
        output.loss = output.loss + logits.float().square().mean()
    logits.retain_grad()
    logits.register_hook(lambda gradient: hooked.append(gradient) or 2 * gradient)
    values = gradients(model, output.loss + logits.sin().sum() if is_read else output.loss, logits)
    return [*values, *hooked, logits.detach()]


def with_fast_weights(model: Any) -> list[Any]:
    fast = {name: (tensor.detach() * 1.5).requires_grad_() for name, tensor in model.named_parameters()}
    output = functional_call(model, fast, (), {"input_ids": batch(model), "labels": batch(model)})
    return gradients(model, output.loss + entropy(output.logits), *fast.values())


def with_a_parametrised_head(model: Any) -> list[Tensor]:
    torch.manual_seed(0)
    parametrizations.spectral_norm(model.lm_head)
    call(model).loss.backward()
    return [buffer for name, buffer in model.named_buffers() if "lm_head" in name]


def with_nan(model: Any, *, in_head: bool) -> list[Tensor]:
    with torch.no_grad():
        (model.lm_head if in_head else model.model.norm).weight[0] = float("nan")
    with torch.inference_mode(not in_head):
        output = call(model)
        return [output.loss.detach(), output.logits.detach() + 0]


@torch.no_grad()
def written_by(model: Any, write: Callable[[Tensor], Any]) -> list[Tensor]:
    logits = call(model).logits
    rows = logits.view(-1, logits.shape[-1])
    write(logits)
    return [entropy(rows), rows + 0]


def read_in_inference_mode(model: Any) -> list[Any]:
    with torch.no_grad():
        logits = call(model).logits
    with torch.inference_mode():
        logits.argmax(-1)
    scale = torch.ones(logits.shape[-1], device=logits.device, requires_grad=True)
    return [*gradients(model, (logits * scale).sum(), scale), logits.mul_(0.5)]


OUTCOMES: dict[str, Callable[[Any], list[Any]]] = {
    "a leaf of detached ones": lambda model: of_a_leaf(model, Tensor.detach),
    "a teacher's as a leaf": lambda model: of_a_leaf(model, lambda logits: logits, no_grad=True),
    "scaled gradients": lambda model: gradients(model, entropy(ScaledGradient.apply(call(model).logits))),
    "a checkpoint": of_a_checkpoint,
    "detached, over a step": lambda model: kept_over_a_step(model, Tensor.detach),
    "rows, over a step": lambda model: kept_over_a_step(model, lambda x: x[:, :-1]),
    "a sum of losses, over a step": lambda model: kept_over_a_step(model, lambda x: entropy(x, reduction="sum")),
    "a buffer of labels": with_a_buffer_of_labels,
    "a gradient of unread ones": lambda model: with_a_gradient_of_them(model, is_read=False),
    "a gradient of read ones": lambda model: with_a_gradient_of_them(model, is_read=True),
    "fast weights": with_fast_weights,
    "a parametrised head": with_a_parametrised_head,
    "NaN in the head": lambda model: with_nan(model, in_head=True),
    "NaN in hidden states": lambda model: with_nan(model, in_head=False),
    "written rows": lambda model: written_by(model, lambda x: [row.mul_(2) for row in x]),
    "written unbound": lambda model: written_by(model, lambda x: x.unbind(1)[0].fill_(3)),
    "written columns": lambda model: written_by(model, lambda x: x[..., 0].fill_(3)),
    "first read in inference mode": read_in_inference_mode,
    "dlpack": lambda model: [torch.from_dlpack(dlpack.to_dlpack(call(model).logits.detach()))],
}


def pair(device: str) -> tuple[Any, Any]:
    stock = build("llama", seed=0, device=device).train()
    fused = copy.deepcopy(stock)
    fused_norm.apply_fused_norm(fused, modules="lm_head")
    return stock, fused


@pytest.mark.parametrize("name", OUTCOMES)
def test_it_is_as_in_stock(name: str, device: str) -> None:
    expected, actual = (OUTCOMES[name](model) for model in pair(device))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_labels_leave_the_model_as_plain_tensors(device: str) -> None:
    _, fused = pair(device)
    kinds: list[type] = []
    fused.loss_function = lambda logits, labels, **_: kinds.append(type(labels)) or entropy(logits)
    call(fused)
    assert kinds == [Tensor]


def test_a_compiled_function_of_them_has_one_graph_and_is_logged(
    device: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_norm_module, "_warned", {})
    results = []
    for model in pair(device):
        graphs: list[Any] = []
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda logits: logits.float().logsumexp(-1).square().mean(),
            backend=lambda module, _, graphs=graphs: graphs.append(module) or module.forward,
        )
        for _ in range(3):
            model.zero_grad()
            output = call(model)
            values = gradients(model, output.loss + compiled(output.logits))
        results.append([torch.tensor(len(graphs)), *values])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    assert "torch.compile does not trace" in caplog.text


def test_a_pytorch_without_the_names_that_skip_code_compiles_the_right_values() -> None:
    program = """
import torch
frames = torch._C._dynamo.eval_frame
own = frames.set_code_exec_strategy
del frames.set_code_exec_strategy
import fused_norm.patcher.lazy_logits
frames.set_code_exec_strategy = own  # which this PyTorch's compiler needs
from tests.patcher.test_logits_after_the_forward import call, pair
stock, fused = pair("cpu")
compiled = torch.compile(lambda logits: logits.float().logsumexp(-1), backend="eager")
torch.testing.assert_close(compiled(call(fused).logits), call(stock).logits.float().logsumexp(-1))
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
