"""Which modules rotate queries and keys by halves: told by the functions that a forward calls, and their results."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

_DEPTH = 3

_Tests = tuple[tuple[ast.expr, bool], ...]
"""The tests of ``if`` that code is under, each with how it has to come out for the code to run."""


def rotates(module: nn.Module) -> bool:
    """Return whether the forward of a module, or a method that it calls, calls a function that is a half rotation.

    A call that the module's settings never reach does not count.
    """
    cls: Any = type(module)
    return _may_rotate(cls) and any(map(_is_half_rotation, _called(cls, module)))


@cache
def _may_rotate(cls: Any) -> bool:
    """Return whether a module of a class rotates by halves under any settings."""
    return not cls.__module__.startswith("torch.") and any(map(_is_half_rotation, _called(cls, None)))


def _called(cls: Any, module: nn.Module | None) -> Iterator[FunctionType]:
    """The functions that a forward, and methods that it calls, may call by name; of ``None`` under any settings."""
    forward = inspect.unwrap(cls.forward)
    methods = [forward] if isinstance(forward, FunctionType) else []
    for method in methods:  # grows meanwhile
        for name, tests in _names_under_tests(method):
            if module is not None and not all(_may_come_out(*test, method, module) for test in tests):
                continue
            function, called = method.__globals__.get(name), inspect.getattr_static(cls, name, None)
            if isinstance(function, FunctionType):
                yield function
            if isinstance(called, FunctionType) and called not in methods and not hasattr(nn.Module, name):
                methods.append(called)


@cache
def _names_under_tests(method: FunctionType) -> dict[tuple[str, _Tests], None]:
    """The names of globals and attributes that a method uses, each with the tests that it is under."""
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(method))).body[0]
    except (OSError, TypeError, SyntaxError):
        return dict.fromkeys((name, ()) for name in _names(method.__code__))
    return dict.fromkeys(_used(definition, ()))


def _used(node: ast.AST, tests: _Tests) -> Iterator[tuple[str, _Tests]]:
    if isinstance(node, (ast.If, ast.IfExp)):
        yield from _used(node.test, tests)
        for arm, truth in ((node.body, True), (node.orelse, False)):
            for part in arm if isinstance(arm, list) else [arm]:
                yield from _used(part, (*tests, (node.test, truth)))
        return
    if isinstance(node, (ast.Name, ast.Attribute)):
        yield node.id if isinstance(node, ast.Name) else node.attr, tests
    for child in ast.iter_child_nodes(node):
        yield from _used(child, tests)


def _may_come_out(test: ast.expr, truth: bool, method: FunctionType, module: nn.Module) -> bool:
    """Return whether a test comes out like this for a module; a test of more than its settings may."""
    own = {method.__code__.co_varnames[0]: module}
    try:
        return bool(eval(compile(ast.Expression(test), "<test>", "eval"), method.__globals__, own)) is truth
    except Exception:  # a local variable that is not known here, or whatever a property raises
        return True


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


@cache
def _is_half_rotation(function: FunctionType) -> bool:
    """By values if it can be called with cos and sin; else if it calls, somewhere, a function ``rotate_half``."""
    names = list(inspect.signature(function).parameters)
    if not any("cos" in name for name in names) or not any("sin" in name for name in names):
        return False
    results = [_rotated(function, *way) for way in itertools.product((1, 2), (2, 3), (4, 3), (1.0, 0.5))]
    tried = [result for result in results if result is not None]
    if tried:
        return any(tried)
    return _reaches_half(function, _DEPTH)


def _reaches_half(function: FunctionType, depth: int) -> bool:
    values = [function.__globals__.get(name) for name in _names(function.__code__)]
    functions = [value for value in values if isinstance(value, FunctionType)]
    return any(_swaps_halves(function) or (depth > 0 and _reaches_half(function, depth - 1)) for function in functions)


@cache
def _swaps_halves(function: FunctionType) -> bool:
    try:
        x = torch.arange(1.0, 9.0)[None]
        return len(inspect.signature(function).parameters) == 1 and torch.equal(
            function(x), torch.cat([-x[:, 4:], x[:, :4]], -1)
        )
    except Exception:  # a foreign function may raise anything
        return False


def _rotated(function: FunctionType, tensors: int, cos_dims: int, dims: int, share: float) -> bool | None:
    """Return whether it rotates so many tensors of these dimensions by halves; None if it cannot be called so."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    width = int(8 * share)
    with torch.device("cpu"), torch.no_grad():
        heads = [random(*(3, 2, 8) if dims == 3 else (1, 2, 3, 8)) for _ in range(tensors)]
        cos, sin = random(3, width), random(3, width)
        angles = [angle[None] if cos_dims == 3 else angle for angle in (cos, sin)]
        try:
            rotated = function(*heads, *angles)
        except Exception:  # a foreign function may raise anything
            return None
    rotated = rotated if isinstance(rotated, tuple) else (rotated,)
    if len(rotated) != tensors or not all(isinstance(result, Tensor) for result in rotated):
        return None
    if share < 1:
        cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    if dims == 3:
        cos, sin = cos[:, None], sin[:, None]
    for x, actual in zip(heads, rotated, strict=True):
        if actual.shape != x.shape:
            return None
        expected = x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin
        if not torch.allclose(actual.to(x.dtype), expected, atol=1e-5):
            return False
    return True
