"""Tiny models, the sites that are fused in them, steps of training, and comparisons of results."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import fused_norm
from fused_norm.model_configs import FAMILIES, build, families_here

NEWER_MODEL_TYPES = [
    name
    for name in families_here()
    if FAMILIES[name].layers_of_type or name in ("gemma4_text", "olmo3", "glm4", "ministral3", "gpt_oss")
]
"""The families of ``test_newer_families.py``."""

MODEL_TYPES = [name for name in families_here() if name not in NEWER_MODEL_TYPES]
"""The families that all other tests of this folder use."""

QUICK_MODEL_TYPES = ("qwen3", "llama", "gemma3_text")
"""The families of the fast tests: with norms of heads, with rotations alone, with sandwich norms."""

slow = partial(pytest.param, marks=pytest.mark.slow)
"""Mark parameters of a test as slow."""


def slow_but(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Return these values of a parameter, all but the quick ones marked as slow."""
    return [value if value in quick else slow(value) for value in values]


SLOW_BUT_FOR_A_FEW = slow_but(QUICK_MODEL_TYPES, MODEL_TYPES)
"""All families, for tests that take long with each."""

EXPERTS_ARE_MLPS = transformers.__version__.startswith("4.")
"""Whether each expert is a separate module, like a dense MLP."""


def sites(model_type: str, layers: int | None = None) -> dict[str, int]:
    """Return the counts of the report on a family's tiny model."""
    family = FAMILIES[model_type]
    fused = family.sites(layers)
    if EXPERTS_ARE_MLPS and family.dense_layers is not None:
        fused["mlp"] += fused.pop("experts") * family.tiny["num_experts"]
    return counts(**fused)


def experts(model_type: str) -> set[str]:
    """Return the paths of the experts in a family's tiny model that are computed together."""
    family = FAMILIES[model_type]
    if EXPERTS_ARE_MLPS or family.dense_layers is None:
        return set()
    sparse = set(range(family.tiny["num_hidden_layers"])) - set(family.dense_layers)
    return {f"model.layers.{layer}.mlp.experts" for layer in sparse}


def counts(**fused: int) -> dict[str, int]:
    """Return the counts of a report: these, and 0 for the other kinds."""
    return fused_norm.PatchReport("", None, ()).counts | fused


def tokens(device: str = "cpu", batch: int = 2, length: int = 5) -> torch.Tensor:
    """Return few tokens: the interpreter takes time for each program of a grid."""
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(1), device="cpu").to(device)


def random_model(config: Any, device: str, dtype: torch.dtype) -> Any:
    """Return a model whose parameters are all random: ones and zeros hide wrong casts."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.to(device, dtype)


def gradients_of(model: nn.Module) -> Gradients:
    gradients = ((name, parameter.grad) for name, parameter in model.named_parameters())
    return {name.removeprefix("_orig_mod."): grad.clone() for name, grad in gradients if grad is not None}


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def step(model: nn.Module, ids: torch.Tensor) -> Step:
    """Return logits and gradients of a step of training; assert that every trained parameter has a gradient."""
    model.zero_grad()
    output = model(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    assert not [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
    return output.logits.detach(), gradients_of(model)


Gradients = dict[str, torch.Tensor]
"""Gradients by the name of the parameter."""

Step = tuple[torch.Tensor, Gradients]
"""The logits and the gradients that ``step`` returns."""


class Subclass(torch.Tensor):
    """A class of tensors that changes nothing."""


class Watching(TorchDispatchMode):
    """A mode that sees all operators of PyTorch and changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


Tensors = Iterable[torch.Tensor | None] | Mapping[str, torch.Tensor | None]
"""Tensors in their order or by name, of which some may be None."""


def assert_all_near(actual: Tensors, expected: Tensors, bound: float, floor: float = 0.0) -> None:
    """Assert equal dtypes, None in the same places, and relative distances of at most ``bound``.

    ``floor``: an absolute distance that is allowed too, for tensors that are 0 but for roundings.
    """
    if isinstance(actual, Mapping) and isinstance(expected, Mapping):
        assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
        pairs = [(name, actual[name], b) for name, b in expected.items()]
    else:
        pairs = [(str(place), *pair) for place, pair in enumerate(zip(actual, expected, strict=True))]
    far = []
    for name, a, b in pairs:
        if a is None or b is None:
            far += [] if a is b else [f"{name}: one is None"]
        elif a.dtype != b.dtype:
            far.append(f"{name}: {a.dtype}, not {b.dtype}")
        elif not (torch.equal(a, b) or (bound and distance(a, b) <= bound * b.double().norm() + floor)):
            far.append(f"{name}: {relative(a, b):.2g} apart")
    assert not far, f"of {len(pairs)} tensors these differ: {far}"


def assert_same(actual: Tensors, expected: Tensors) -> None:
    """Assert equal bits and dtypes, and None in the same places."""
    assert_all_near(actual, expected, 0.0)


def assert_same_bits(actual: Step, expected: Step) -> None:
    assert_same({"logits": actual[0], **actual[1]}, {"logits": expected[0], **expected[1]})


def equal_in_fp32(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether results of different kernels agree: to the bit, or on a GPU but for the order of sums in a row."""
    if not actual.is_cuda:
        return torch.equal(actual, expected)
    return actual.dtype == expected.dtype and relative(actual, expected) < (
        2e-6 if actual.dtype == torch.float32 else 2e-3
    )


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages of this package: other packages log too, some of them only on a GPU."""
    return [record.getMessage() for record in caplog.records if record.name == "fused_norm"]


def distance(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (actual.double() - expected.double()).norm()


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return (distance(actual, expected) / expected.double().norm()).item()


def assert_gradients_near(actual: Gradients, expected: Gradients, bound: float = 1e-5, floor: float = 0.0) -> None:
    """Assert that the same parameters, at least one, have gradients that are near."""
    assert expected
    assert_all_near(actual, expected, bound, floor)


def assert_near(actual: Step, expected: Step, gradients: float = 1e-5) -> None:
    """Assert that two steps in fp32 agree but for the order of sums."""
    assert relative(actual[0], expected[0]) < 2e-6
    assert_gradients_near(actual[1], expected[1], gradients)


def assert_trains_as_stock(stock: nn.Module, fused: nn.Module, ids: torch.Tensor) -> None:
    assert_near(step(fused, ids), step(stock, ids))


def rows_of(ids: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Return a Trainer's data: sequences that are their own labels."""
    return [{"input_ids": row, "labels": row} for row in ids.cpu()]


def trainer_of(
    model: Any, folder: Path, data: list[dict[str, torch.Tensor]], kind: type[Trainer] = Trainer, **options: Any
) -> Trainer:
    """Return a Trainer that logs every step; ``options``: its own, or those of ``TrainingArguments``."""
    own = {name: options.pop(name) for name in ("callbacks", "compute_metrics", "model_init") if name in options}
    how = {
        "per_device_train_batch_size": 1, "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "use_cpu": not torch.cuda.is_available(), "disable_tqdm": True,
    }  # fmt: skip
    arguments = TrainingArguments(str(folder), **how | options)
    return kind(model=model, args=arguments, train_dataset=data, eval_dataset=data, **own)


def losses_of(trainer: Trainer) -> torch.Tensor:
    """Return the losses that a Trainer has logged."""
    return torch.tensor([row["loss"] for row in trainer.state.log_history if "loss" in row])


def is_fused(module: nn.Module) -> bool:
    return hasattr(type(module), "fused_norm_origin")


def snapshot(model: nn.Module) -> list[tuple[type, dict]]:
    return [(type(module), dict(vars(module))) for module in model.modules()]


def fused_copy(stock: nn.Module, **options: Any) -> Any:
    """Return a copy of a model, fused with these options."""
    fused = copy.deepcopy(stock)
    fused_norm.apply_fused_norm(fused, **options)
    return fused


def twins(config_or_type: Any, device: str, **kwargs) -> tuple[nn.Module, nn.Module]:
    """Return a stock model and its fused copy."""
    stock = build(config_or_type, seed=0, device=device, **kwargs)
    return stock, fused_copy(stock)


def pair(device: str, name: Any = "llama", **options: Any) -> tuple[Any, Any]:
    """Return a stock model, and its twin with a fused head and loss alone: the interpreter takes time for the rest."""
    own = build(name, seed=0, device=device, **options).train()
    fused = copy.deepcopy(own)
    fused_norm.apply_fused_norm(fused, modules="lm_head")
    return own, fused


class ScaledGradient(torch.autograd.Function):
    """A function of somebody's, which scales gradients."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 0.1
