"""A recognition is repeated if anything that the code reaches has changed, and it keeps nothing alive."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Callable
from functools import partial, wraps

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.models.gemma import modeling_gemma
from transformers.models.llama import modeling_llama

import fused_norm
from fused_norm.model_configs import build, tiny_config
from fused_norm.patcher import code_fingerprint
from fused_norm.patcher.code_fingerprint import fingerprint

from .models import relative, tokens

SCALE, SETTINGS = 2.0, {"power": 2}


class Norm(nn.Module):
    """A norm whose code names a method, a class attribute and an instance attribute."""

    centered = False

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps, self.rounded = nn.Parameter(torch.rand(16)), 1e-6, False

    def root(self, variance):
        return torch.rsqrt(variance + self.eps)

    def forward(self, x):
        dtype, x = x.dtype, x.float()
        x = x - x.mean(-1, keepdim=True) if self.centered else x
        x = x * self.root(x.pow(2).mean(-1, keepdim=True))
        return self.weight * (x if self.rounded else x.to(dtype))


class DerivedNorm(Norm):
    def root(self, variance):
        return super().root(variance)


def turned(x):
    """Turn half of each row by a function of the module, with its number and its setting."""
    first, second = (half * SCALE / 2 for half in x.chunk(2, dim=-1))
    return torch.cat((-second, first), dim=-1) ** (SETTINGS["power"] - 1)


def rotate(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def wrapped(function: Callable) -> Callable:
    @wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Half:
    """A value that replaces a method or a property."""

    value = 0.5


@pytest.mark.parametrize(
    ("root", "place", "name", "value"),
    [
        (rotate, "global", "turned", lambda x: x),
        (rotate, "global", "SCALE", 3.0),
        (rotate, "global", "SETTINGS", {"power": 3}),
        (rotate, torch, "cat", lambda *args, **kwargs: None),
        (rotate, torch.Tensor, "chunk", lambda *args, **kwargs: None),
        (rotate, rotate, "__defaults__", (2,)),
        (rotate, rotate, "__code__", (lambda q, k, cos, sin, unsqueeze_dim=1: (q, k)).__code__),
        (wrapped(rotate), "global", "SCALE", 3.0),
        (partial(rotate, unsqueeze_dim=1), "global", "SCALE", 3.0),
        (Norm(), Norm, "root", lambda self, variance: variance),
        (DerivedNorm(), Norm, "root", lambda self, variance: variance),
        (Norm(), Norm, "centered", True),
        (Norm(), torch, "rsqrt", torch.sqrt),
        (nn.SiLU(), functional, "silu", lambda x, inplace=False: x),
        (functional.silu, torch._C._nn, "silu", lambda x: x),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_code_reaches_by_name_is_in_its_key(root, place, name: str, value, monkeypatch) -> None:
    before = fingerprint(root).key
    assert before is not None
    assert before == fingerprint(root).key
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules[__name__] if place == "global" else place, name, value)
        assert fingerprint(root).key != before
    assert fingerprint(root).key == before


def test_attributes_of_an_instance_are_in_its_key_and_may_hide_those_of_its_class() -> None:
    norm = Norm()
    before = fingerprint(norm).key
    assert fingerprint(Norm()).key == before, "parameters are not"
    for name, value in (("rounded", True), ("rounded", 0), ("eps", 1e-5), ("centered", False)):
        changed = Norm()
        setattr(changed, name, value)
        assert fingerprint(changed).key != before, name
    norm.root = types.MethodType(Norm.root, norm)
    assert fingerprint(norm).key != before


def test_of_norms_alike_an_apply_looks_at_one_and_at_each_that_differs(monkeypatch) -> None:
    def norm(**attributes: object) -> Norm:
        norm = Norm()
        vars(norm).update(attributes)
        return norm

    differing = ({}, {"rounded": 0}, {"rounded": True}, {"eps": 1e-5}, {"sizes": (1,)}, {"sizes": (2,)})
    keys = [fingerprint(norm(**attributes)).key for attributes in differing]
    with code_fingerprint.no_code_changes():
        assert [fingerprint(norm(**attributes)).key for attributes in differing] == keys
    looked_at = []
    walk = code_fingerprint._Traversal
    monkeypatch.setattr(
        code_fingerprint, "_Traversal", lambda root: looked_at.append(type(root).__name__) or walk(root)
    )
    model = nn.Sequential(*(norm() for _ in range(4)), norm(rounded=True), DerivedNorm())
    for times in (1, 2):
        fused_norm.apply_fused_norm(model)
        assert looked_at == ["Norm", "Norm", "DerivedNorm"] * times


def test_numbers_of_functions_around_are_in_its_key() -> None:
    def times(scale: float) -> Callable:
        return lambda x: x * scale

    assert fingerprint(times(2.0)).key == fingerprint(times(2.0)).key
    assert fingerprint(times(2.0)).key != fingerprint(times(3.0)).key


def test_what_has_no_value_has_no_key() -> None:
    norm = Norm()
    norm.config = Half()
    assert fingerprint(norm).key is None
    assert fingerprint(lambda x: x * SCALE).key is not None
    constant = torch.ones(2)
    assert fingerprint(lambda x: x * constant).key is None


def test_a_class_defined_again_has_the_key_of_the_first() -> None:
    def define() -> nn.Module:
        class Scaled(nn.Module):
            def forward(self, x):
                return x * SCALE

        return Scaled()

    assert fingerprint(define()).key == fingerprint(define()).key


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


def test_a_flag_flipped_after_patching_is_seen_by_applying_again() -> None:
    model = nn.Sequential(Norm(), Norm())
    fused_norm.apply_fused_norm(model)
    model[0].centered = True
    report = fused_norm.apply_fused_norm(model)
    assert [(site.path, site.cause) for site in report.kept] == [("0", "unrecognised")]
    assert type(model[0]) is Norm
    model[0].centered = False
    assert fused_norm.apply_fused_norm(model).counts["norm"] == 2


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


def test_a_rotation_by_a_kernel_of_others_is_not_tried() -> None:
    from fused_norm.patcher.probe import UnrecognisedError
    from fused_norm.patcher.rotation_recognition import recognise_rotation

    def rotates(q, k, cos, sin, unsqueeze_dim=1):
        return OfOthers.apply(q, k, cos, sin)

    assert recognise_rotation(rotate).function is rotate
    with pytest.raises(UnrecognisedError, match=r"rotates runs .*OfOthers, which is not tried"):
        recognise_rotation(rotates)
    assert not OfOthers.tried


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="PyTorch has no such interface")
def test_precisions_set_by_the_newer_interface_are_read(device: str) -> None:
    """PyTorch's older interface raises then. The Trainer sets them so for ``tf32=True`` and ``torch_compile=True``."""
    torch.backends.fp32_precision = "tf32"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    assert fused_norm.apply_fused_norm(build("llama", seed=0, device=device)).counts["norm"] > 0
