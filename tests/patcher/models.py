"""Tiny models, what is fused in them, a step of training, and how far results are apart."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import fused_norm
from fused_norm.model_configs import FAMILIES, build, families_here
from fused_norm.spec import KINDS, Kind

NEWER_MODEL_TYPES = [
    name
    for name in families_here()
    if FAMILIES[name].layers_differ or name in ("olmo3", "glm4", "ministral3", "gpt_oss")
]
"""The families of ``test_newer_families.py``."""

MODEL_TYPES = [name for name in families_here() if name not in NEWER_MODEL_TYPES]
"""The families that every other test of this folder takes."""

QUICK_MODEL_TYPES = ("qwen3", "llama", "gemma3_text")
"""Those that the fast tests take: with norms of heads, with rotations by themselves, with sandwiches."""

SLOW_BUT_FOR_A_FEW = [
    *QUICK_MODEL_TYPES,
    *(pytest.param(name, marks=pytest.mark.slow) for name in MODEL_TYPES if name not in QUICK_MODEL_TYPES),
]
"""All of them, for tests that take long with each."""

EXPERTS_ARE_MLPS = transformers.__version__.startswith("4.")
"""Each expert is a module of its own, like a dense MLP."""


def sites(model_type: str, layers: int | None = None) -> dict[Kind, int]:
    """The counts of the report on a family's tiny model."""
    family = FAMILIES[model_type]
    found = family.sites(layers)
    if EXPERTS_ARE_MLPS and family.dense_layers is not None:
        found["mlp"] += found.pop("experts") * family.tiny["num_experts"]
    return counts(**found)


def experts(model_type: str) -> set[str]:
    """The paths of the experts in a family's tiny model that are computed together."""
    family = FAMILIES[model_type]
    if EXPERTS_ARE_MLPS or family.dense_layers is None:
        return set()
    sparse = set(range(family.tiny["num_hidden_layers"])) - set(family.dense_layers)
    return {f"model.layers.{layer}.mlp.experts" for layer in sparse}


def counts(**fused: int) -> dict[Kind, int]:
    """The counts of a report: these, and none of the other kinds."""
    return dict.fromkeys(KINDS, 0) | fused


def tokens(device: str = "cpu", batch: int = 2, length: int = 5) -> torch.Tensor:
    """Few, for the interpreter takes time for each program of a grid."""
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(1), device="cpu").to(device)


def gradients_of(model: nn.Module) -> Gradients:
    """Copies of the gradients that parameters have, by their names in a model that is not compiled."""
    gradients = ((name, parameter.grad) for name, parameter in model.named_parameters())
    return {name.removeprefix("_orig_mod."): grad.clone() for name, grad in gradients if grad is not None}


def step(model: nn.Module, ids: torch.Tensor) -> Step:
    """Logits and gradients of a step of training, in which every trained parameter gets one."""
    model.zero_grad()
    output = model(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    assert not [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
    return output.logits.detach(), gradients_of(model)


Gradients = dict[str, torch.Tensor]
"""By the name of the parameter."""

Step = tuple[torch.Tensor, Gradients]
"""What ``step`` returns: logits, and gradients."""


def assert_same_bits(one: Step, other: Step) -> None:
    assert torch.equal(one[0], other[0])
    assert one[1].keys() == other[1].keys()
    different = [name for name, gradient in one[1].items() if not torch.equal(gradient, other[1][name])]
    assert not different


def equal_in_fp32(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two calls agree whose kernels differ: to the bit, on a GPU but for the order of the sums in a row."""
    if not one.is_cuda:
        return torch.equal(one, other)
    return one.dtype == other.dtype and relative(one, other) < (2e-6 if one.dtype == torch.float32 else 2e-3)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages of this package: other packages log as well, some of them on a GPU alone."""
    return [record.getMessage() for record in caplog.records if record.name == "fused_norm"]


def relative(value: torch.Tensor, truth: torch.Tensor) -> float:
    return ((value.double() - truth.double()).norm() / truth.double().norm()).item()


def assert_gradients_near(actual: Gradients, expected: Gradients, bound: float = 1e-5) -> None:
    """The same parameters have gradients, and none is further away than ``bound``, relatively."""
    assert actual.keys() == expected.keys()
    worst = max((relative(actual[name], value), name) for name, value in expected.items())
    assert worst[0] < bound, worst


def assert_near(actual: Step, expected: Step, gradients: float = 1e-5) -> None:
    """In fp32, but for the order of sums."""
    assert relative(actual[0], expected[0]) < 2e-6
    assert_gradients_near(actual[1], expected[1], gradients)


def assert_trains_as_stock(stock: nn.Module, fused: nn.Module, ids: torch.Tensor) -> None:
    assert_near(step(fused, ids), step(stock, ids))


def snapshot(model: nn.Module) -> list[tuple[type, dict]]:
    return [(type(module), dict(vars(module))) for module in model.modules()]


def fused_copy(stock: nn.Module, **options: Any) -> Any:
    """A copy of a model, fused with these options."""
    fused = copy.deepcopy(stock)
    fused_norm.apply_fused_norm(fused, **options)
    return fused


def twins(config_or_type: Any, device: str, **kwargs) -> tuple[nn.Module, nn.Module]:
    """A stock model and its fused copy."""
    stock = build(config_or_type, seed=0, device=device, **kwargs)
    return stock, fused_copy(stock)
