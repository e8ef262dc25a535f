"""Code that was recognised before is run again at each apply, and nothing that recognition has seen stays alive."""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import gc
import math
import os
import pickle
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
from fused_norm.patcher import activation_recognition, norm_recognition
from fused_norm.patcher.activation_recognition import recognise_activation
from fused_norm.patcher.native_code import native_code
from fused_norm.patcher.probe import UnrecognisedError
from fused_norm.patcher.rotation_recognition import recognise_rotation

from .models import relative, tokens


class Config:
    centered = False


CONFIG = Config()


class Norm(nn.Module):
    """A norm that asks an attribute of its own, its class and a config whether it subtracts a mean."""

    centered = False

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps, self.rounded, self.config = nn.Parameter(torch.rand(16)), 1e-6, False, CONFIG

    def forward(self, x):
        dtype, x = x.dtype, x.float()
        x = x - x.mean(-1, keepdim=True) if self.centered or self.config.centered else x
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x if self.rounded else x.to(dtype))


class DerivedNorm(Norm):
    pass


def turned(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def neighbours_turned(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def rotate(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def test_of_norms_alike_an_apply_runs_one_and_each_that_differs(monkeypatch) -> None:
    def norm(**attributes: object) -> Norm:
        norm = Norm()
        vars(norm).update(attributes)
        return norm

    ran = []
    compare = norm_recognition._compare_with_formulas
    monkeypatch.setattr(
        norm_recognition, "_compare_with_formulas", lambda module: ran.append(module) or compare(module)
    )
    differing = ({"rounded": 0}, {"rounded": True}, {"eps": 1e-5}, {"sizes": (1,)}, {"sizes": (1.0,)}, {"sizes": [1]})
    model = nn.Sequential(norm(), norm(sizes=(1,)), *(norm(**attributes) for attributes in differing), DerivedNorm())
    for times in (1, 2):
        fused_norm.apply_fused_norm(model)
        assert len(ran) == times * (1 + len(differing) + 1)


class ByName(type):
    """Classes that are equal if their names are."""

    def __eq__(cls, other: object) -> bool:
        return getattr(other, "__name__", None) == cls.__name__

    def __hash__(cls) -> int:
        return hash(cls.__name__)


def flag(value: bool) -> functools.partial:
    held = functools.partial(int)
    held.value = value
    return held


class FlaggedNorm(Norm):
    """A norm that is centered if an attribute of a partial function says so, or if it has a certain buffer."""

    def __init__(self, held: functools.partial, *buffers: str) -> None:
        super().__init__()
        self.held = held
        for name in buffers:
            self.register_buffer(name, None)

    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True) if self.held.value or "centers" in self._buffers else x)


class NormLikeAnother(Norm, metaclass=ByName):
    pass


NORM_LIKE_ANOTHER = ByName("NormLikeAnother", (Norm,), {"centered": True})


@pytest.mark.parametrize(
    "norms",
    [
        lambda: (FlaggedNorm(flag(False)), FlaggedNorm(flag(True))),
        lambda: (FlaggedNorm(flag(False), "other"), FlaggedNorm(flag(False), "centers")),
        lambda: (NormLikeAnother(), NORM_LIKE_ANOTHER()),
    ],
    ids=["an attribute of a partial function", "the name of a buffer", "a class that equals another"],
)
def test_norms_that_differ_in_little_are_told_apart(norms: Callable[[], tuple[Norm, Norm]]) -> None:
    for order in (1, -1):
        model = nn.Sequential(*norms()[::order])
        (kept,) = fused_norm.apply_fused_norm(model).kept
        assert kept.path == ("1" if order == 1 else "0")


def test_norms_with_equal_lists_of_their_own_are_alike(monkeypatch) -> None:
    ran = []
    compare = norm_recognition._compare_with_formulas
    monkeypatch.setattr(norm_recognition, "_compare_with_formulas", lambda norm: ran.append(norm) or compare(norm))
    model = nn.Sequential(*(Norm() for _ in range(3)))
    for norm in model:
        vars(norm).update(sizes=[1, {"a": torch.device("cpu")}])
    model[2].sizes.append(model[2].sizes)
    assert fused_norm.apply_fused_norm(model).counts["norm"] == 3
    assert ran == [model[0], model[2]]


class InferenceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()


def test_a_norm_that_cannot_be_differentiated_is_kept() -> None:
    class InferenceNorm(Norm):
        def forward(self, x):
            return super().forward(InferenceFunction.apply(x))

    (kept,) = fused_norm.apply_fused_norm(nn.Sequential(InferenceNorm(), Norm())).kept
    assert kept.path == "0"


def test_of_activations_alike_an_apply_runs_one(monkeypatch) -> None:
    ran = []
    compare = activation_recognition._formula_of
    monkeypatch.setattr(activation_recognition, "_formula_of", lambda calls: ran.append(calls) or compare(calls))
    model = build("gemma3_text", seed=0)
    assert model.model.layers[0].mlp.act_fn is not model.model.layers[1].mlp.act_fn
    assert fused_norm.apply_fused_norm(model).counts["mlp"] > 1
    assert len(ran) == 1


def _replaced_rotation() -> tuple[object, str, Callable]:
    return (
        modeling_llama,
        "rotate_half",
        lambda x: torch.cat((x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1),
    )


def _replaced_norm() -> tuple[object, str, Callable]:
    return modeling_gemma.GemmaRMSNorm, "_norm", lambda self, x: x / (x.abs().mean(-1, keepdim=True) + self.eps)


def _replaced_activation() -> tuple[object, str, Callable]:
    return functional, "silu", lambda x, inplace=False: x * torch.sigmoid(1.7 * x)


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(tokens(), use_cache=False).logits


@pytest.mark.parametrize(
    ("model_type", "replacement", "kind"),
    [
        ("llama", _replaced_rotation, "rope"),
        ("gemma", _replaced_norm, "norm"),
        ("llama", _replaced_activation, "mlp"),
    ],
    ids=["rotate_half", "_norm", "silu"],
)
def test_what_is_replaced_between_two_models_or_after_patching_is_seen(
    model_type: str, replacement: Callable, kind: str, monkeypatch
) -> None:
    config = tiny_config(model_type, num_hidden_layers=1)
    patched_before = build(config, seed=0)
    usual = fused_norm.apply_fused_norm(patched_before).counts
    assert usual[kind]
    with monkeypatch.context() as patched:
        patched.setattr(*replacement())
        expected = logits(build(config, seed=0))
        for model in (build(config, seed=0), patched_before):
            report = fused_norm.apply_fused_norm(model, strict=False)
            assert report.counts[kind] == 0
            assert {site.cause for site in report.kept} == {"unrecognised"}
            assert relative(logits(model), expected) < 2e-6
    expected = logits(build(config, seed=0))
    for model in (build(config, seed=0), patched_before):
        assert fused_norm.apply_fused_norm(model).counts == usual
        assert relative(logits(model), expected) < 2e-6


def test_copies_are_of_the_class_of_what_they_copy_whatever_was_patched_before(monkeypatch) -> None:
    config = tiny_config("llama", num_hidden_layers=1)
    before, model = build(config, seed=0), build(config, seed=0)
    fused_norm.apply_fused_norm(before)
    monkeypatch.setattr(modeling_llama, "rotate_half", neighbours_turned)
    expected = logits(model)
    assert fused_norm.apply_fused_norm(model).counts["rope"] == 1
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert list(map(type, copied.modules())) == list(map(type, model.modules()))
        assert relative(logits(copied), expected) < 2e-6
    assert type(before.model.layers[0].self_attn) is not type(model.model.layers[0].self_attn)


@pytest.mark.parametrize("where", [Norm, CONFIG])
def test_a_flag_flipped_after_patching_is_seen_by_applying_again(where: Any, monkeypatch) -> None:
    model = nn.Sequential(Norm(), DerivedNorm(), nn.RMSNorm(16, eps=1e-6))
    fused_norm.apply_fused_norm(model)
    with monkeypatch.context() as patched:
        patched.setattr(where, "centered", True)
        report = fused_norm.apply_fused_norm(model)
        assert [(site.path, site.cause) for site in report.kept] == [("0", "unrecognised"), ("1", "unrecognised")]
        assert type(model[0]) is Norm
    model[0].centered = True
    assert [site.path for site in fused_norm.apply_fused_norm(model).kept] == ["0"]
    model[0].centered = False
    assert fused_norm.apply_fused_norm(model).counts["norm"] == 3


def test_an_eps_that_is_another_by_now_changes_no_class() -> None:
    model = nn.Sequential(Norm())
    fused_norm.apply_fused_norm(model)
    fused, model[0].eps = type(model[0]), 0.5
    (site,) = fused_norm.apply_fused_norm(model).fused
    assert site.spec is not None
    assert site.spec.eps == 0.5
    assert type(model[0]) is fused


def test_an_eps_that_is_none_by_now_keeps_the_norm() -> None:
    x = torch.randn(3, 16)
    model = nn.Sequential(nn.RMSNorm(16, eps=1e-6))
    fused_norm.apply_fused_norm(model)
    model[0].eps = None
    report = fused_norm.apply_fused_norm(model, strict=False)
    assert [site.reason for site in report.kept] == ["has no eps among its attributes"]
    assert torch.equal(model(x), nn.functional.rms_norm(x, (16,), model[0].weight, None))


def test_classes_defined_again_and_again_do_not_stay_alive() -> None:
    def define() -> weakref.ref:
        class Again(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight, self.eps = nn.Parameter(torch.rand(16)), 1e-6

            def forward(self, x):
                y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
                return self.weight * y.to(x.dtype)

        model = nn.Sequential(Again())
        assert fused_norm.apply_fused_norm(model, recompute=True).counts["norm"] == 1
        return weakref.ref(Again)

    defined = [define() for _ in range(3)]
    gc.collect()
    assert [reference() for reference in defined] == [None] * 3


class OfOthers(torch.autograd.Function):
    """A kernel of another library, like Liger's for rotations."""

    tried = False

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        OfOthers.tried = True
        return rotate(q, k, cos, sin)

    @staticmethod
    def backward(ctx, *gradients):
        return *gradients, None, None


class Holder:
    kernels = types.SimpleNamespace, [OfOthers]

    @staticmethod
    def run():
        return Holder.kernels


MODULE = types.ModuleType("module")
MODULE.kernel = OfOthers  # type: ignore[attr-defined]


def with_default(x, kernel=OfOthers):
    return kernel.apply(x)


@functools.lru_cache
def remembering():
    return OfOthers


REACH_A_KERNEL: dict[str, Callable[..., Any]] = {
    "a global": lambda x: OfOthers.apply(x),
    "a function inside": lambda x: (lambda: OfOthers.apply(x))(),
    "a class and a list on it": lambda x: Holder.run(),
    "an attribute of a module": lambda x: MODULE.kernel(x),
    "getattr": lambda x: getattr(MODULE, "kernel").apply(x),  # noqa: B009
    "a default": with_default,
    "a partial function": functools.partial(print, OfOthers),
    "a cache": remembering,
    "a variable of a function around": (lambda kernel: lambda x: kernel.apply(x))(OfOthers),
}


@pytest.mark.parametrize("way", REACH_A_KERNEL)
def test_a_kernel_is_found_wherever_code_reaches_it(way: str) -> None:
    assert native_code(REACH_A_KERNEL[way]) == f"{__name__}.OfOthers"


@pytest.mark.parametrize("root", [rotate, functional.silu, math.sqrt, nn.SiLU(), modeling_llama.apply_rotary_pos_emb])
def test_python_over_pytorch_is_no_kernel(root: Any) -> None:
    assert native_code(root) is None


def test_a_rotation_by_a_kernel_of_others_is_not_tried() -> None:
    def rotates(q, k, cos, sin, unsqueeze_dim=1):
        return OfOthers.apply(q, k, cos, sin)

    assert recognise_rotation(rotate).function is rotate
    with pytest.raises(UnrecognisedError, match=r"rotates runs .*OfOthers, which is not tried"):
        recognise_rotation(rotates)
    assert not OfOthers.tried


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
        return nn.functional.silu(x) if thing is not None else thing

    model = Norm()
    vars(model)["held"] = thing
    for root in (act, model, functools.partial(act, thing), lambda x, held=thing: held):
        assert native_code(root) is None
    assert recognise_activation(act).formula == "silu"
    x = torch.randn(3, 16)
    expected = model(x)
    report = fused_norm.apply_fused_norm(model)
    assert report.counts["norm"] == 1, str(report)
    assert torch.allclose(model(x), expected)
