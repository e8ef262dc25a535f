"""A forward is rewritten only if its source is the code that runs, and nothing else changes."""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import inspect
import linecache
import sys
import traceback
import weakref

import pytest
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import fused_norm
from fused_norm.model_configs import build
from fused_norm.patcher.patterns import patterns_of, rewritten_forward
from fused_norm.patcher.source import Helper, SourceError, source_of

from .forwards import Recorder, assert_becomes, everything

ADDED = "y0, a = self.fused_norm_add(self.norm, a, b); return y0"
"""``a = a + b; return self.norm(a)``, fused."""


class Returned(Recorder):
    def forward(self, a, b=None, *, c: float = 1.0):
        a = a + b * c
        return self.norm(a)


factor = 2.0


class WithDefaults(Recorder):
    """A forward whose defaults have the values from when the class was defined."""

    factor = 3.0

    def forward(self, a, b=factor, *, c=[factor]):  # noqa: B006
        a = a + b * c[0]
        return self.norm(a)


def class_with(factor: int) -> type[Recorder]:
    class UsesAVariable(Recorder):
        def forward(self, a, b):
            a = a + factor * b
            return self.norm(a)

    return UsesAVariable


class _Private(Recorder):
    __factor = 3.0

    def __scaled(self, a):
        return a * self.__factor

    def forward(self, a, __b):
        scaled = self.__scaled(__b)
        a = a + scaled
        return self.norm(a)


def undisclosed(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def scaled(by):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return by * function(*args, **kwargs)

        return wrapper

    return decorate


def test_signature_name_and_globals_stay() -> None:
    forward = rewritten_forward(Returned, everything(Returned))
    assert inspect.signature(forward) == inspect.signature(Returned.forward)
    assert forward.__qualname__ == Returned.forward.__qualname__
    assert forward.__globals__ is Returned.forward.__globals__


def test_defaults_are_those_of_the_function_that_runs() -> None:
    assert_becomes(WithDefaults, "y0, a = self.fused_norm_add(self.norm, a, b * c[0]); return y0", (5.0,))
    assert inspect.signature(rewritten_forward(WithDefaults, everything(WithDefaults))) == inspect.signature(
        WithDefaults.forward
    )


def test_private_names_are_those_of_the_class() -> None:
    fused = "y0, a = self.fused_norm_add(self.norm, a, __b, inner=self.__scaled); return y0"
    assert_becomes(_Private, fused, (2.0, 3.0))
    assert inspect.signature(rewritten_forward(_Private, everything(_Private))) == inspect.signature(_Private.forward)


def test_a_wrapper_that_the_source_shows_is_kept() -> None:
    class Decorated(Recorder):
        forward = undisclosed(Returned.forward)

    class Shown(Recorder):
        @undisclosed
        def forward(self, a, b):
            a = a + b
            return self.norm(a)

    assert rewritten_forward(Shown, everything(Shown)).__wrapped__.__code__.co_name == "forward"
    assert_becomes(Shown, ADDED, (2.0, 3.0))
    with pytest.raises(SourceError, match=r"wrapped by .*test_source, which its source does not show"):
        patterns_of(Decorated)


def test_a_decorator_whose_arguments_may_have_changed_is_not_called_again() -> None:
    class Literal(Recorder):
        @scaled(by=2.0)
        def forward(self, a, b):
            a = a + b
            return self.norm(a)

    class Named(Recorder):
        @scaled(by=factor)
        def forward(self, a, b):
            a = a + b
            return self.norm(a)

    assert_becomes(Literal, ADDED, (2.0, 3.0))
    with pytest.raises(SourceError, match=r"its decorator scaled\(by=factor\) may be given something else by now"):
        patterns_of(Named)


def test_a_forward_that_sees_all_of_its_names_is_refused() -> None:
    class Sees(Recorder):
        def forward(self, a, b):
            a = a + b
            a = self.norm(a)
            return sum(value for value in locals().values() if isinstance(value, float))

    with pytest.raises(SourceError, match="its forward calls locals, which sees the names"):
        patterns_of(Sees)


def test_sources_that_cannot_be_trusted_are_refused(tmp_path) -> None:
    with pytest.raises(SourceError, match="closes over factor"):
        patterns_of(class_with(2))

    namespace: dict = {"Recorder": Recorder}
    body = "(Recorder):\n    def forward(self, a, b):\n        a = a + b\n        return self.norm(a)\n"
    exec(f"class NoFile{body}", namespace)
    with pytest.raises(SourceError, match="cannot be read"):
        patterns_of(namespace["NoFile"])

    source = f"class Stale{body}".replace("a + b", "a + b * 2.5")
    path = tmp_path / "stale.py"
    for old, new in (("a + b", "a + a"), ("2.5", "3.5"), ("self.norm", "self.other"), ("b):", "b, c=1):")):
        path.write_text(source)
        exec(compile(source, str(path), "exec"), namespace)
        path.write_text(source.replace(old, new))
        linecache.checkcache(str(path))
        with pytest.raises(SourceError, match="not the code that runs"):
            patterns_of(namespace["Stale"])

    builtin = type("Builtin", (Recorder,), {"forward": len})
    with pytest.raises(SourceError, match="builtin"):
        patterns_of(builtin)


def test_tracebacks_show_the_rewritten_line() -> None:
    forward = rewritten_forward(Returned, everything(Returned))
    with pytest.raises(TypeError) as error:
        forward(Returned(), 1.0, "b")
    assert "self.fused_norm_add(self.norm, a, b * c)" in "".join(traceback.format_tb(error.tb))
    assert "fused_norm_add" in inspect.getsource(forward)


def test_each_rewrite_of_a_forward_shows_its_own_source() -> None:
    sources = []
    for consumers in (True, False):
        model = build("llama", seed=0)
        fused_norm.apply_fused_norm(model, consumers=consumers)
        sources.append(inspect.unwrap(type(model.model.layers[0]).forward))
    assert ["fused_norm_passthrough" in inspect.getsource(forward) for forward in sources] == [True, False]


def test_the_modelling_module_gains_no_name() -> None:
    module = inspect.getmodule(LlamaDecoderLayer)
    before = dict(vars(module))
    rewritten_forward(LlamaDecoderLayer, everything(LlamaDecoderLayer))
    assert vars(module) == before


def test_what_is_known_of_a_class_holds_it_no_longer_than_others_do(tmp_path) -> None:
    """A cell of a notebook that defines a layer is run again and again."""
    path, seen = tmp_path / "cell.py", []
    body = "class Layer(Recorder):\n    def forward(self, a, b):\n        a = a + b\n        return self.norm(a)\n"
    path.write_text(body)
    for _ in range(5):
        namespace: dict = {"Recorder": Recorder}
        exec(compile(body, str(path), "exec"), namespace)
        layer = namespace["Layer"]
        assert_becomes(layer, ADDED, (2, 3))
        seen += [weakref.ref(layer), weakref.ref(layer.forward)]
    del namespace, layer
    gc.collect()
    assert [reference for reference in seen if reference() is not None] == []


def test_a_forward_that_cannot_be_read_is_not_held_either() -> None:
    layer = class_with(2)
    for _ in range(2):
        with pytest.raises(SourceError, match="closes over factor"):
            patterns_of(layer)
    held = weakref.ref(layer)
    del layer
    gc.collect()
    assert held() is None


def test_matches_are_found_once_and_no_rewriting_changes_them() -> None:
    first = ast.dump(source_of(LlamaDecoderLayer).definition)
    texts = {inspect.getsource(rewritten_forward(LlamaDecoderLayer, everything(LlamaDecoderLayer))) for _ in range(2)}
    assert len(texts) == 1
    assert patterns_of(LlamaDecoderLayer) is patterns_of(LlamaDecoderLayer)
    assert ast.dump(source_of(LlamaDecoderLayer).definition) == first


FILE = '''
import functools
from torch import nn

def keep(function):
    return function

if nn is None:
    class Other(nn.Module):
        pass
else:
    class InAnElse(nn.Module):
        def forward(self, a):
            return functools.reduce(max, a)

@keep
class AfterText(nn.Module):
    """Text
class Text:
    def forward(self): pass
"""
    @keep
    def forward(self, a):
        return helper(a)

@keep
@functools.lru_cache(
    maxsize=4
)
def helper(a):
    return functools.reduce(min, a)
'''


@pytest.mark.parametrize("name", ["InAnElse", "AfterText", "helper"])
def test_a_definition_is_found_wherever_it_is_in_a_file(name: str, tmp_path, monkeypatch) -> None:
    """Other definitions, which begin at lines without indentation, are left out when it is compiled."""
    path = tmp_path / "odd_file.py"
    path.write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("odd_file")
    monkeypatch.delitem(sys.modules, "odd_file")
    value = getattr(module, name)
    source = source_of(value if inspect.isclass(value) else Helper(value.__wrapped__, is_method=False))
    expected = "helper" if name == "helper" else "forward"
    assert source.definition.name == expected
    assert ast.unparse(source.definition.body) in path.read_text()
    assert source.around == ("_" if name == "helper" else name)
