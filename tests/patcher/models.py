"""Tiny models, what is fused in them, a step of training, and how far results are apart."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments

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

slow = partial(pytest.param, marks=pytest.mark.slow)
"""Parameters of a slow test."""


def slow_but(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """These values of a parameter, slow but for the quick ones."""
    return [value if value in quick else slow(value) for value in values]


SLOW_BUT_FOR_A_FEW = slow_but(QUICK_MODEL_TYPES, MODEL_TYPES)
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


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


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


Tensors = Iterable[torch.Tensor | None] | Mapping[str, torch.Tensor | None]
"""Several, in their order or by name, of which some may be None."""


def assert_all_near(found: Tensors, expected: Tensors, bound: float) -> None:
    """They have the same dtypes, are None in the same places, and relatively no further apart than ``bound``."""
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        pairs = [(name, found[name], other) for name, other in expected.items()]
    else:
        pairs = [(str(place), *pair) for place, pair in enumerate(zip(found, expected, strict=True))]
    far = []
    for name, one, other in pairs:
        if one is None or other is None:
            far += [] if one is other else [f"{name}: one is None"]
        elif one.dtype != other.dtype:
            far.append(f"{name}: {one.dtype}, not {other.dtype}")
        elif not (torch.equal(one, other) or (bound and relative(one, other) < bound)):
            far.append(f"{name}: {relative(one, other):.2g} apart")
    assert not far, f"of {len(pairs)} tensors these differ: {far}"


def assert_same(found: Tensors, expected: Tensors) -> None:
    """They have the same bits and dtypes, and are None in the same places."""
    assert_all_near(found, expected, 0.0)


def assert_same_bits(one: Step, other: Step) -> None:
    assert_same({"logits": one[0], **one[1]}, {"logits": other[0], **other[1]})


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


def assert_gradients_near(actual: Gradients, expected: Gradients, bound: float = 1e-5, floor: float = 0.0) -> None:
    """The same parameters have gradients, and none is further away than ``bound``, relatively.

    ``floor``: a distance that is none, for gradients that are 0 but for roundings.
    """
    assert expected
    assert actual.keys() == expected.keys()
    distances = {name: (actual[name].double() - value.double()).norm() for name, value in expected.items()}
    norms = {name: value.double().norm() for name, value in expected.items()}
    far = {
        name: (one.item(), norms[name].item())
        for name, one in distances.items()
        if not one <= bound * norms[name] + floor
    }
    assert not far, f"distances and norms: {far}"


def assert_near(actual: Step, expected: Step, gradients: float = 1e-5) -> None:
    """In fp32, but for the order of sums."""
    assert relative(actual[0], expected[0]) < 2e-6
    assert_gradients_near(actual[1], expected[1], gradients)


def assert_trains_as_stock(stock: nn.Module, fused: nn.Module, ids: torch.Tensor) -> None:
    assert_near(step(fused, ids), step(stock, ids))


def rows_of(ids: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Data of a Trainer: sequences that are their own labels."""
    return [{"input_ids": row, "labels": row} for row in ids.cpu()]


def trainer_of(
    model: Any, folder: Path, data: list[dict[str, torch.Tensor]], kind: type[Trainer] = Trainer, **options: Any
) -> Trainer:
    """A Trainer that logs every step; ``options`` are its own, or those of ``TrainingArguments``."""
    own = {name: options.pop(name) for name in ("callbacks", "compute_metrics", "model_init") if name in options}
    how = {
        "per_device_train_batch_size": 1, "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "use_cpu": not torch.cuda.is_available(), "disable_tqdm": True,
    }  # fmt: skip
    arguments = TrainingArguments(str(folder), **how | options)
    return kind(model=model, args=arguments, train_dataset=data, eval_dataset=data, **own)


def losses_of(trainer: Trainer) -> torch.Tensor:
    """The losses that a Trainer has logged."""
    return torch.tensor([row["loss"] for row in trainer.state.log_history if "loss" in row])


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
