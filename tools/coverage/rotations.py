"""How modules rotate queries and keys: told by the functions that a forward calls, and the results of these."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn

Layout = Literal["halves", "neighbours", "complex"]
"""``halves``: elements i and i + width / 2 of a head are a pair. ``neighbours``: 2 i and 2 i + 1 are, wherever their
results are put. ``complex``: neighbours are multiplied as complex numbers."""

_DEPTH, _WIDTH = 3, 8
_WAYS = tuple(itertools.product((1, 2), (2, 3), (4, 3), (1.0, 0.5)))
"""Ways to call a rotation: the number of heads' tensors, the dimensions of cos, those of heads, the share rotated."""

_Tests = tuple[tuple[ast.expr, bool], ...]
"""The tests of ``if`` that code is under, each with how it has to come out for the code to run."""


def layouts_of(module: nn.Module) -> frozenset[Layout]:
    """The layouts of the rotations that a forward calls, or a method that it calls.

    A call that the module's settings never reach does not count.
    """
    cls: Any = type(module)
    return frozenset().union(*map(_layouts, _called(cls, module))) if _may_rotate(cls) else frozenset()


@cache
def _may_rotate(cls: Any) -> bool:
    """Return whether a module of a class rotates under any settings."""
    return not cls.__module__.startswith("torch.") and any(map(_layouts, _called(cls, None)))


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
def _layouts(function: FunctionType) -> frozenset[Layout]:
    """By values if it can be called with its angles; else by the function ``rotate_half`` that it calls somewhere."""
    names = list(inspect.signature(function).parameters)
    if any("freqs_ci" in name for name in names):
        return frozenset({"complex"}) if _multiplies(function) else frozenset()
    if not any("cos" in name for name in names) or not any("sin" in name for name in names):
        return frozenset()
    results = [_layout(function, *way) for way in _WAYS]
    if any(result is not None for result in results):
        return frozenset(result for result in results if result not in (None, "other"))  # type: ignore[misc]
    return frozenset({"halves"}) if _reaches_half(function, _DEPTH) else frozenset()


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


def _result(function: FunctionType, heads: list[Tensor], *angles: Tensor) -> list[Tensor] | None:
    """The results for these heads, as many and of the same shapes; None if it cannot be called so."""
    try:
        results = function(*(x.clone() for x in heads), *angles)
    except Exception:  # a foreign function may raise anything
        return None
    results = list(results) if isinstance(results, tuple) else [results]
    if len(results) != len(heads) or not all(isinstance(result, Tensor) for result in results):
        return None
    fits = all(result.shape == x.shape for result, x in zip(results, heads, strict=True))
    return [result.to(torch.float32) for result in results] if fits else None


def _layout(
    function: FunctionType, tensors: int, cos_dims: int, dims: int, share: float
) -> Layout | Literal["other"] | None:
    """The layout in which it rotates so many tensors of these dimensions; None if it cannot be called so."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"), torch.no_grad():
        shape = (3, 2, _WIDTH) if dims == 3 else (1, 2, 3, _WIDTH)
        cos, sin = (torch.rand(3, int(_WIDTH * share), generator=generator) + 0.1 for _ in range(2))
        angles = [angle[None] if cos_dims == 3 else angle for angle in (cos, sin)]
        rows = []  # what each element of the first row of heads becomes
        for unit in torch.eye(_WIDTH):
            outputs = _result(function, [unit.expand(shape).contiguous()] * tensors, *angles)
            if outputs is None:
                return None
            rows.append(outputs[-1].flatten(0, -2)[0])
        matrix = torch.stack(rows)
    if _turns_pairs(matrix.view(2, -1, _WIDTH).transpose(0, 1), cos[0], sin[0]):
        return "halves"
    return "neighbours" if _turns_pairs(matrix.view(-1, 2, _WIDTH), cos[0], sin[0]) else "other"


def _turns_pairs(pairs: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether the two elements of each pair are rotated, unless they are left alone.

    ``pairs``: what elements of a head become, [pairs, 2, width]. ``cos`` and ``sin``: the values that each may be.
    """

    def is_one_of(value: Tensor, angles: Tensor) -> bool:
        return bool((value - angles).abs().min() < 1e-5)

    turned = 0
    for first, second in pairs:
        places = (first.abs() + second.abs()).nonzero().flatten().tolist()
        if len(places) != 2:
            return False
        (a, b), (c, d) = first[places], second[places]
        if torch.equal(torch.stack([first[places], second[places]]), torch.eye(2)):
            continue
        if not (is_one_of(a, cos) and is_one_of(b, sin) and is_one_of(-c, sin) and is_one_of(d, cos)):
            return False
        turned += 1
    return turned > 1


def _multiplies(function: FunctionType) -> bool:
    """Return whether it turns heads by complex numbers of length 1: every pair of neighbours keeps its length."""
    generator = torch.Generator().manual_seed(0)
    heads_first, tokens_first, one_sequence = (1, 2, 3, _WIDTH), (1, 3, 2, _WIDTH), (3, 2, _WIDTH)
    with torch.device("cpu"), torch.no_grad():
        angles = torch.randn(3, _WIDTH // 2, generator=generator)
        numbers = torch.polar(torch.ones_like(angles), angles)
        for shape in (heads_first, tokens_first, one_sequence):
            x = torch.randn(shape, generator=generator)
            for count, freqs in itertools.product((1, 2), (numbers, numbers[None])):
                turned = _result(function, [x] * count, freqs)
                if turned is None or torch.allclose(turned[0], x):
                    continue
                before, after = (tensor.unflatten(-1, (-1, 2)).norm(dim=-1) for tensor in (x, torch.stack(turned)))
                if torch.allclose(before.expand_as(after), after, atol=1e-4):
                    return True
    return False
