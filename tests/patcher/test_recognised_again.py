"""Code that was recognised before is run again at each apply, and nothing that recognition has seen stays alive."""

from __future__ import annotations

import argparse
import collections
import functools
import gc
import os
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.models.gemma import modeling_gemma
from transformers.models.llama import modeling_llama

import fused_norm
from fused_norm.model_configs import build, tiny_config

from .models import relative, tokens
from .rotary import rotates
from .test_activation_recognition import mlp_of
from .test_rotation_recognition import attention


class Config:
    centered = False


CONFIG = Config()


class Norm(nn.Module):
    """A norm that asks an attribute of its own, its class and a config whether it subtracts a mean."""

    centered = False
    runs = 0

    def __init__(self, **attributes: object) -> None:
        super().__init__()
        self.weight, self.eps, self.rounded, self.config = nn.Parameter(torch.rand(16)), 1e-6, False, CONFIG
        vars(self).update(attributes)

    def forward(self, x):
        Norm.runs += 1
        dtype, x = x.dtype, x.float()
        x = x - x.mean(-1, keepdim=True) if self.centered or self.config.centered else x
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x if self.rounded else x.to(dtype))


class DerivedNorm(Norm):
    pass


def runs_of(*norms: Norm) -> int:
    """How often the forwards run when these norms are patched."""
    before, model = Norm.runs, nn.Sequential(*norms)
    assert fused_norm.apply_fused_norm(model).counts["norm"] == len(norms)
    return Norm.runs - before


def test_of_norms_alike_an_apply_runs_one_and_each_that_differs() -> None:
    one, cyclic = runs_of(Norm()), [1]
    cyclic.append(cyclic)
    differing: list[dict[str, Any]] = [{"rounded": 0}, {"eps": 1e-5}, {"sizes": (1,)}]
    differing += [{"sizes": (1.0,)}, {"sizes": [1, {"a": torch.device("cpu")}]}, {"sizes": cyclic}]
    differing += [{"held": functools.partial(int)}, {"held": functools.partial(int)}, {"_buffers": {"a": None}}]
    differing[-2]["held"].flag = True
    norms = [Norm(), DerivedNorm(), *(Norm(**attributes) for attributes in differing)]
    alike = [Norm(sizes=(1,)), Norm(sizes=[1, {"a": torch.device("cpu")}])]
    assert runs_of(*norms, *alike) == one * len(norms)
    assert runs_of(*norms) == one * len(norms)


REPLACED: dict[str, tuple[str, object, str, Callable]] = {
    "rope": (
        "llama",
        modeling_llama,
        "rotate_half",
        lambda x: torch.cat((x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1),
    ),
    "norm": (
        "gemma",
        modeling_gemma.GemmaRMSNorm,
        "_norm",
        lambda self, x: x / (x.abs().mean(-1, keepdim=True) + self.eps),
    ),
    "mlp": ("llama", functional, "silu", lambda x, inplace=False: x * torch.sigmoid(1.7 * x)),
}
"""By kind of row: a model, and what is replaced in its code by what."""


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(tokens(), use_cache=False).logits


@pytest.mark.parametrize("kind", REPLACED)
def test_what_is_replaced_between_two_models_or_after_patching_is_seen(kind: str, monkeypatch) -> None:
    model_type, *replacement = REPLACED[kind]
    config = tiny_config(model_type, num_hidden_layers=1)
    patched_before = build(config, seed=0)
    usual = fused_norm.apply_fused_norm(patched_before).counts
    assert usual[kind]
    for replaced in (True, False):
        if replaced:
            monkeypatch.setattr(*replacement)
        else:
            monkeypatch.undo()
        expected = logits(build(config, seed=0))
        for model in (build(config, seed=0), patched_before):
            report = fused_norm.apply_fused_norm(model, strict=False)
            assert report.counts[kind] == 0 if replaced else report.counts == usual
            assert {site.cause for site in report.kept} == ({"unrecognised"} if replaced else set())
            assert relative(logits(model), expected) < 2e-6


def test_another_rotation_in_the_same_code_makes_another_class(monkeypatch) -> None:
    config = tiny_config("llama", num_hidden_layers=1)
    before, model = build(config, seed=0), build(config, seed=0)
    fused_norm.apply_fused_norm(before)
    monkeypatch.setattr(
        modeling_llama, "rotate_half", lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    )
    expected = logits(model)
    assert fused_norm.apply_fused_norm(model).counts["rope"] == 1
    assert relative(logits(model), expected) < 2e-6
    assert type(before.model.layers[0].self_attn) is not type(model.model.layers[0].self_attn)


@pytest.mark.parametrize("where", [Norm, CONFIG])
def test_a_flag_flipped_after_patching_is_seen_by_applying_again(where: Any, monkeypatch) -> None:
    model = nn.Sequential(Norm(), DerivedNorm(), nn.RMSNorm(16, eps=1e-6))
    fused_norm.apply_fused_norm(model)
    monkeypatch.setattr(where, "centered", True)
    report = fused_norm.apply_fused_norm(model)
    assert [(site.path, site.cause) for site in report.kept] == [("0", "unrecognised"), ("1", "unrecognised")]
    assert type(model[0]) is Norm
    monkeypatch.undo()
    model[0].centered = True
    assert [site.path for site in fused_norm.apply_fused_norm(model).kept] == ["0"]


def test_classes_defined_again_and_again_do_not_stay_alive() -> None:
    def define() -> list[weakref.ref]:
        class Again(Norm):
            def forward(self, x):
                y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
                return self.weight * y.to(x.dtype)

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm, self.other = Again(), Again()

            def forward(self, x):
                y = self.norm(x)
                x = x + y
                return self.other(x)

        counts = fused_norm.apply_fused_norm(nn.Sequential(Layer()), recompute=True).counts
        assert (counts["norm"], counts["residual"]) == (2, 1)
        return [weakref.ref(Again), weakref.ref(Layer)]

    defined = [*define(), *define()]
    gc.collect()
    assert [reference() for reference in defined] == [None] * 4


def unlike_others() -> Iterator[Any]:
    """Yield objects that have no hash, or whose methods raise errors or return tensors or nonsense."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("not to be asked")

    def tensor(*_: Any) -> Any:
        return torch.ones(3)

    methods = ("__eq__", "__hash__", "__repr__", "__bool__", "__len__", "__iter__")
    for answer in (fails, tensor):
        meta = type("MetaOf" + answer.__name__, (type,), dict.fromkeys(methods, answer))
        kind = meta("Of" + answer.__name__, (), dict.fromkeys(methods, answer) | {"__class__": property(answer)})
        yield kind()
        yield kind
        for base in (str, float, dict):
            yield type(f"{base.__name__}_{answer.__name__}", (base,), dict.fromkeys(methods, answer))()
    yield from (os.environ, {1, 2}, {1: {2}}, collections.deque([1]), argparse.Namespace(), collections.ChainMap())
    yield from (10**5000, float("nan"), slice(1), range(3), Ellipsis, "\ud800", memoryview(b"1"), iter([1]))
    yield weakref.ref(argparse.Namespace())
    yield weakref.proxy(CONFIG)
    yield type("Nowhere", (), {"__module__": None})
    yield types.FunctionType((lambda: 1).__code__, {"__name__": None})
    yield types.FunctionType((lambda: 1).__code__.replace(co_consts=(None, [1])), globals())
    yield type("Computed", (types.ModuleType,), {"__getattr__": fails})("computed")
    yield functools.partial(print, collections.deque())


@pytest.mark.parametrize("number", range(len(list(unlike_others()))))
def test_no_error_comes_out_of_recognition_whatever_a_thing_answers(number: int) -> None:
    thing = list(unlike_others())[number]

    def act(x):
        return functional.silu(x) if thing is not None else thing

    def rotation(q, k, cos, sin, unsqueeze_dim=1, held=thing):
        return rotates(q, k, cos, sin, unsqueeze_dim)

    assert mlp_of(act)[1].activation == "silu"
    assert attention(rotation)[1] is None
    assert runs_of(Norm(held=thing)) > 0
