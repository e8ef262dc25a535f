"""Layers are rewritten by dataflow, only where the source is what runs, and keep everything else."""

from __future__ import annotations

import functools
import inspect
import linecache
import traceback

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fused_norm.patcher import rewrite
from fused_norm.patcher.rewrite import SourceError, norms_after_adds, rewritten_forward


class Layer(nn.Module):
    """The parts that the forwards below use; the call of a norm is recorded with what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.flag = True

    def norm(self, x):
        return x * 3

    def other(self, x):
        return x * 5

    def pair(self, x):
        return x, x

    def fused_norm_add(self, norm, residual, branch):
        self.calls.append(norm.__name__)
        return norm(residual + branch), residual + branch


class Llama(Layer):
    def forward(self, h):
        residual = h
        h = self.other(h)
        h = residual + h

        # a comment between
        residual = h
        h = self.norm(h)
        h = self.other(h)
        return residual + h


class OtherNames(Layer):
    def forward(self, a, b=2.0, *, c: float = 1.0):
        total = self.other(a) * c + b * a
        kept = also = total
        y = self.norm(total)
        return y + kept * also


class Returned(Layer):
    def forward(self, a, b):
        a = a + b
        return self.norm(a)


class Nested(Layer):
    def forward(self, a, b):
        if self.flag:
            with torch.no_grad():
                a = a + b
                b = a
                a = self.norm(a)
        else:
            a = b + b
            a = self.other(a)
        return a * b


class TwoAdds(Layer):
    def forward(self, a, b):
        a = a + b
        a = self.norm(a)
        a = a + b
        a = self.other(a)
        a = b + a
        return self.norm(a)


@pytest.mark.parametrize(
    ("layer", "names", "arguments"),
    [
        (Llama, ("norm",), (2.0,)),
        (OtherNames, ("norm",), (2.0,)),
        (Returned, ("norm",), (2.0, 3.0)),
        (Nested, ("norm", "other"), (2.0, 3.0)),
        (TwoAdds, ("norm", "other"), (2.0, 3.0)),
    ],
)
def test_the_sum_is_handed_to_the_norm_and_nothing_else_changes(layer, names, arguments) -> None:
    assert norms_after_adds(layer) == names
    forward = rewritten_forward(layer, names)
    assert inspect.signature(forward) == inspect.signature(layer.forward)
    assert forward.__qualname__ == layer.forward.__qualname__
    assert forward.__globals__ is layer.forward.__globals__
    instance = layer()
    assert forward(instance, *arguments) == instance.forward(*arguments)
    assert instance.calls


def test_only_the_names_asked_for_are_handed_over() -> None:
    instance = TwoAdds()
    assert rewritten_forward(TwoAdds, ("norm",))(instance, 2.0, 3.0) == instance.forward(2.0, 3.0)
    assert instance.calls == ["norm", "norm"]


class SumIsChanged(Layer):
    def forward(self, a, b):
        a = a + b
        a = self.other(a) * 2
        return self.norm(a)


class SumIsReplaced(Layer):
    def forward(self, a, b):
        a = a + b
        a = b
        return self.norm(a)


class InPlace(Layer):
    def forward(self, a, b):
        a += b
        return self.norm(a)


class Subtracts(Layer):
    def forward(self, a, b):
        a = a - b
        return self.norm(a)


class NormOfAnother(Layer):
    def forward(self, a, b):
        c = a + b
        a = self.norm(a)
        return a * c


class TakesMore(Layer):
    def forward(self, a, b):
        a = a + b
        return self.norm(a, 2)


class Unpacks(Layer):
    def forward(self, a, b):
        a = a + b
        a, b = self.pair(a)
        return a * b


class InnerFunction(Layer):
    def forward(self, a, b):
        def inner(a, b):
            a = a + b
            return self.norm(a)

        return a - b


@pytest.mark.parametrize(
    "layer", [SumIsChanged, SumIsReplaced, InPlace, Subtracts, NormOfAnother, TakesMore, Unpacks, InnerFunction]
)
def test_what_only_resembles_the_pattern_is_left_alone(layer) -> None:
    assert norms_after_adds(layer) == ()


def test_gemma2_goes_by_dataflow_not_by_name() -> None:
    assert norms_after_adds(Gemma2DecoderLayer) == ("pre_feedforward_layernorm",)
    assert norms_after_adds(LlamaDecoderLayer) == ("post_attention_layernorm",)


class UsesSuper(Layer):
    def forward(self, a, b):
        super().train()
        a = a + b
        return self.norm(a)


def undisclosed(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def test_a_wrapper_that_the_source_shows_is_kept() -> None:
    class Decorated(Layer):
        forward = undisclosed(Returned.forward)

    class Shown(Layer):
        @undisclosed
        def forward(self, a, b):
            a = a + b
            return self.norm(a)

    rewritten = rewritten_forward(Shown, ("norm",))
    assert rewritten.__wrapped__.__code__.co_name == "forward"
    instance = Shown()
    assert rewritten(instance, 2.0, 3.0) == 15.0
    assert instance.calls == ["norm"]
    with pytest.raises(SourceError, match=r"wrapped by .*test_rewrite, which its source does not show"):
        norms_after_adds(Decorated)


def test_sources_that_cannot_be_trusted_are_refused(monkeypatch, tmp_path) -> None:
    with pytest.raises(SourceError, match="closes over __class__"):
        norms_after_adds(UsesSuper)

    namespace: dict = {"Layer": Layer}
    body = "(Layer):\n    def forward(self, a, b):\n        a = a + b\n        return self.norm(a)\n"
    exec(f"class NoFile{body}", namespace)
    with pytest.raises(SourceError, match="cannot be read"):
        norms_after_adds(namespace["NoFile"])

    source = f"class Stale{body}"
    path = tmp_path / "stale.py"
    path.write_text(source)
    exec(compile(source, str(path), "exec"), namespace)
    path.write_text(source.replace("a + b", "a + a"))
    linecache.checkcache(str(path))
    with pytest.raises(SourceError, match="not the code that runs"):
        norms_after_adds(namespace["Stale"])

    builtin = type("Builtin", (Layer,), {"forward": len})
    with pytest.raises(SourceError, match="builtin"):
        norms_after_adds(builtin)


def test_tracebacks_show_the_rewritten_line() -> None:
    forward = rewritten_forward(Returned, ("norm",))
    with pytest.raises(TypeError) as error:
        forward(Returned(), 1.0, "b")
    assert "self.fused_norm_add(self.norm, a, b)" in "".join(traceback.format_tb(error.tb))
    assert "fused_norm_add" in inspect.getsource(forward)


def test_the_modelling_module_gains_no_name() -> None:
    module = inspect.getmodule(LlamaDecoderLayer)
    before = dict(vars(module))
    rewrite.rewritten_forward(LlamaDecoderLayer, ("post_attention_layernorm",))
    assert vars(module) == before
