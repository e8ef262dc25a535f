"""Triton's interpreter looks up its replacements once a launch, and puts the originals back."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from triton import knobs

from fused_norm.kernels import add_rms_norm

from ..interpreter import as_triton_has_it
from .calls import CALLS, every_call
from .numerics import assert_same

if not knobs.runtime.interpret:
    pytest.skip("kernels are compiled", allow_module_level=True)

from triton.runtime import interpreter


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that the interpreter has patched."""
    names: list[str] = []
    patch = interpreter._patch_lang

    def noted(function):
        names.append(function.__name__)
        return patch(function)

    monkeypatch.setattr(interpreter, "_patch_lang", noted)
    return names


def test_what_was_replaced_is_put_back_after_an_error_too(prepared: list[str]) -> None:
    before, load, options = interpreter._patch_lang, tl.load, interpreter.interpreter_builder.options
    x = torch.randn(40, 24)
    add_rms_norm(x, x, torch.randn(24))
    assert (interpreter._patch_lang, tl.load) == (before, load)

    def fail(*arguments, **keywords):
        raise RuntimeError("planted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tl, "load", fail)
        with pytest.raises(interpreter.InterpreterError, match="planted"):
            add_rms_norm(x, x, torch.randn(24))
    assert (interpreter._patch_lang, tl.load) == (before, load)
    assert interpreter.interpreter_builder.options is options
    assert options.sanitize_overflow


@CALLS
def test_what_makes_it_faster_for_tests_changes_no_bit(case: str) -> None:
    call = every_call("cpu")[case]
    call.results()  # after which all types of its operands are known
    fast = call.results()
    with as_triton_has_it():
        assert_same(fast, call.results())
