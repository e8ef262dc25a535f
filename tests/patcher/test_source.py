"""A forward is rewritten only if its source is the code that runs, and nothing else changes."""

from __future__ import annotations

import functools
import inspect
import linecache
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fused_norm

from .forwards import Recorder, assert_becomes, layer_of


class Layer(nn.Module):
    """What the layers here have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(4, eps=1e-6)


class Returned(Layer):
    def forward(self, a, b=None, *, c: float = 1.0):
        a = a + b * c
        return self.norm(a)


def reason_of(layer: type[nn.Module]) -> str:
    """Why the add of a layer is kept; empty if it is fused."""
    report = fused_norm.apply_fused_norm(nn.ModuleList([layer()]), strict=False)
    (row,) = (row for row in report.rows if row.kind == "residual")
    return row.reason or ""


def test_the_rewritten_forward_looks_like_the_original_and_its_module_gains_no_name() -> None:
    before, layer = dict(globals()), Returned()
    fused_norm.apply_fused_norm(nn.ModuleList([layer]))
    forward = inspect.unwrap(type(layer).forward)
    assert inspect.signature(forward) == inspect.signature(Returned.forward)
    assert forward.__qualname__ == Returned.forward.__qualname__
    assert forward.__globals__ is Returned.forward.__globals__
    with pytest.raises(TypeError) as error:
        layer(torch.ones(4), "b", c="c")
    assert "self.fused_norm_add(self.norm, a, b * c)" in "".join(traceback.format_tb(error.tb))
    assert globals() == before


ADDED = "y0, a = self.fused_norm_add(self.norm, a, b); return y0"
"""``a = a + b; return self.norm(a)``, fused."""
factor = 2.0


class WithDefaults(Recorder):
    """A forward whose defaults have the values from when the class was defined."""

    factor = 3.0

    def forward(self, a, b=factor, *, c=[factor]):  # noqa: B006
        a = a + b * c[0]
        return self.norm(a)


def test_defaults_are_those_of_the_function_that_runs() -> None:
    assert_becomes(WithDefaults, "y0, a = self.fused_norm_add(self.norm, a, b * c[0]); return y0", (5.0,))


class _Private(Recorder):
    __factor = 3.0

    def __scaled(self, a):
        return a * self.__factor

    def forward(self, a, __b):
        scaled = self.__scaled(__b)
        a = a + scaled
        return self.norm(a)


def test_private_names_are_those_of_the_class() -> None:
    fused = "y0, a = self.fused_norm_add(self.norm, a, __b, inner=self.__scaled); return y0"
    assert_becomes(_Private, fused, (2.0, 3.0))


def scaled(by):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return by * function(*args, **kwargs)

        return wrapper

    return decorate


def test_a_wrapper_that_the_source_shows_is_kept() -> None:
    class Literal(Recorder):
        @scaled(by=2.0)
        def forward(self, a, b):
            a = a + b
            return self.norm(a)

    assert_becomes(Literal, ADDED, (2.0, 3.0))


class Named(Layer):
    @scaled(by=factor)
    def forward(self, a, b):
        a = a + b
        return self.norm(a)


def layer(body: str) -> type[Layer]:
    return layer_of(body, "a, b", Layer, {"__name__": __name__})


UNDISCLOSED = layer("a = a + b; return self.norm(a)")
UNDISCLOSED.forward = scaled(by=2.0)(UNDISCLOSED.forward)  # type: ignore[method-assign]
SEES = layer("a = a + b; a = self.norm(a); return sum(value for value in locals().values())")


def closing_over(factor: float) -> type[Layer]:
    class UsesAVariable(Layer):
        def forward(self, a, b):
            a = a + factor * b
            return self.norm(a)

    return UsesAVariable


BODY = "(Layer):\n    def forward(self, a, b):\n        a = a + b\n        return self.norm(a)\n"
WITHOUT_FILE: dict[str, Any] = {"Layer": Layer, "__name__": "tests"}
exec(f"class NoFile{BODY}", WITHOUT_FILE)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Named, "its decorator scaled(by=factor) may be given something else by now"),
        (UNDISCLOSED, "which its source does not show"),
        (SEES, "its forward calls locals, which sees the names"),
        (closing_over(2), "closes over factor"),
        (WITHOUT_FILE["NoFile"], "cannot be read"),
    ],
)
def test_sources_that_cannot_be_trusted_are_refused(layer: type[Layer], reason: str) -> None:
    assert reason in reason_of(layer)


@pytest.mark.parametrize(
    ("old", "new"), [("a + b", "a + a"), ("2.5", "3.5"), ("self.norm", "self.other"), ("b):", "b, c=1):")]
)
def test_a_source_that_is_not_the_code_that_runs_is_refused(old: str, new: str, tmp_path: Path) -> None:
    source, path = f"class Stale{BODY}".replace("a + b", "a + b * 2.5"), tmp_path / "stale.py"
    namespace: dict[str, Any] = {"Layer": Layer, "__name__": __name__}
    path.write_text(source)
    exec(compile(source, str(path), "exec"), namespace)
    path.write_text(source.replace(old, new))
    linecache.checkcache(str(path))
    assert "not the code that runs" in reason_of(namespace["Stale"])
