"""Layers rewritten from their own source: a residual add and the norm after it become one call of the norm.

In the forward of a layer,

    hidden = residual + hidden
    residual = hidden
    hidden = self.norm(hidden)

becomes

    y, hidden = self.fused_norm_add(self.norm, residual, hidden)
    residual = hidden
    hidden = y

whatever the names are: the sum that a norm takes is found by following it from statement to statement. Every name keeps
the value it had, and everything else in the forward stays as upstream wrote it.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

_Y = "_fused_norm_y"
_FUTURE_FLAGS = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


class SourceError(Exception):
    """A forward that cannot be rewritten; the message says why."""


@dataclass(frozen=True)
class _Add:
    """``total = left + right``, then copies of names, then a statement that calls ``self.<norm>(total)``."""

    body: list[ast.stmt]
    first: int
    last: int
    norm: str


@cache
def norms_after_adds(layer: Any) -> tuple[str, ...]:
    """The attributes of the norms that take a sum straight from an add in the layer's forward, in order.

    Raises:
        SourceError: where the source cannot be read, or is not what runs.
    """
    definition, function = _source_of(layer)
    return tuple(dict.fromkeys(add.norm for add in _find_adds(definition, _self_name(function))))


def rewritten_forward(layer: type[nn.Module], names: tuple[str, ...]) -> Callable[..., Any]:
    """The layer's forward with the adds before the norms ``names`` handed to those norms.

    The function lives in the namespace of the layer's own module, which gains no name by it.

    Raises:
        SourceError: where the forward cannot be rewritten.
    """
    definition, function = _source_of(layer)
    self_name = _self_name(function)
    for add in reversed(list(_find_adds(definition, self_name))):
        if add.norm in names:
            _hand_to_norm(add, self_name)
    ast.fix_missing_locations(definition)
    filename = f"<fused_norm {layer.__module__}.{layer.__qualname__}.forward>"
    source = ast.unparse(definition)
    # Tracebacks, debuggers and inspect show the rewritten lines.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {}
    try:
        exec(_compile(source, filename, function), function.__globals__, namespace)
    except Exception as error:  # decorators and defaults are evaluated again, and may need what is gone
        raise SourceError(f"its source does not run again: {type(error).__name__}: {error}") from error
    forward = namespace[definition.name]
    forward.__qualname__ = function.__qualname__
    return forward


def _source_of(layer: type[nn.Module]) -> tuple[ast.FunctionDef, FunctionType]:
    """The definition of the layer's forward, and the function that it defines, without decorators."""
    function, wrappers = _unwrap(layer.forward)
    if function.__code__.co_freevars:
        raise SourceError(f"its forward closes over {', '.join(function.__code__.co_freevars)}")
    try:
        lines, _ = inspect.findsource(function)
        tree = ast.parse("".join(lines))
        codes = list(_codes(_compile(tree, "<source>", function)))
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        raise SourceError(f"the source of its forward cannot be read: {error}") from error
    definition = next((node for node in ast.walk(tree) if _first_line(node) == function.__code__.co_firstlineno), None)
    if not isinstance(definition, ast.FunctionDef) or not any(_same_code(code, function.__code__) for code in codes):
        raise SourceError("the source of its forward is not the code that runs")
    definition.decorator_list = list(_decorators_of(wrappers, definition, function))
    return definition, function


def _decorators_of(
    wrappers: list[FunctionType], definition: ast.FunctionDef, function: FunctionType
) -> Iterator[ast.expr]:
    """The decorators that made ``wrappers``, outermost first; the others returned the function as it is."""
    decorators = iter(definition.decorator_list)
    for wrapper in wrappers:
        module = wrapper.__globals__["__name__"]
        decorator = next((decorator for decorator in decorators if _module_of(decorator, function) == module), None)
        if decorator is None:
            raise SourceError(f"its forward is wrapped by {module}, which its source does not show")
        yield decorator


def _first_line(node: ast.AST) -> int | None:
    """The line a function's code starts at: that of its first decorator, if it has one."""
    if not isinstance(node, ast.FunctionDef):
        return None
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _module_of(decorator: ast.expr, function: FunctionType) -> str | None:
    """Where the wrappers that a decorator makes come from: the module that defines the decorator."""
    name = decorator.func if isinstance(decorator, ast.Call) else decorator
    try:
        value = eval(compile(ast.Expression(name), "<decorator>", "eval"), function.__globals__)
    except Exception:  # whatever a name or attribute lookup raises
        return None
    return getattr(value, "__module__", None)


def _unwrap(forward: Any) -> tuple[FunctionType, list[FunctionType]]:
    """The innermost function, and the wrappers around it that its source must show.

    transformers' layers wrap the forward of each subclass for gradient checkpointing; a fused class gets that anew.
    """
    wrappers = []
    while hasattr(forward, "__wrapped__"):
        if getattr(forward, "__globals__", {}).get("__name__") != "transformers.modeling_layers":
            wrappers.append(forward)
        forward = forward.__wrapped__
    if not isinstance(forward, FunctionType):
        raise SourceError(f"its forward is a {type(forward).__name__}, not a function")
    return forward, wrappers


def _self_name(function: FunctionType) -> str:
    return function.__code__.co_varnames[0]


def _compile(source: str | ast.Module, filename: str, like: FunctionType) -> CodeType:
    return compile(source, filename, "exec", flags=like.__code__.co_flags & _FUTURE_FLAGS, dont_inherit=True)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """``code`` and all code objects inside it, outermost first."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _same_code(one: CodeType, other: CodeType) -> bool:
    """Whether one is the other, compiled again."""

    def facts(code: CodeType) -> tuple[Any, ...]:
        constants = [repr(constant) for constant in code.co_consts if not isinstance(constant, CodeType)]
        return (
            code.co_firstlineno,
            code.co_code,
            code.co_names,
            code.co_varnames,
            code.co_freevars,
            code.co_cellvars,
            constants,
        )

    return [facts(code) for code in _codes(one)] == [facts(code) for code in _codes(other)]


def _find_adds(definition: ast.FunctionDef, self_name: str) -> Iterator[_Add]:
    for body in _bodies(definition):
        for first, statement in enumerate(body):
            total = _target_of_add(statement)
            if total is None:
                continue
            last = first + 1
            while last < len(body) and _is_copy(body[last], unless_to=total):
                last += 1
            norm = _norm_call(body[last], total, self_name) if last < len(body) else None
            if norm is not None:
                yield _Add(body, first, last, norm.func.attr)  # type: ignore[attr-defined]


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements that belongs to this function itself."""
    for field in ("body", "orelse", "finalbody"):
        body = getattr(node, field, None)
        if isinstance(body, list):
            yield body
            for statement in body:
                if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    yield from _bodies(statement)
    for handler in getattr(node, "handlers", ()):
        yield from _bodies(handler)


def _target_of_add(statement: ast.stmt) -> str | None:
    """``h`` of ``h = a + b``."""
    if (
        isinstance(statement, ast.Assign)
        and len(statement.targets) == 1
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.BinOp)
        and isinstance(statement.value.op, ast.Add)
    ):
        return statement.targets[0].id
    return None


def _is_copy(statement: ast.stmt, unless_to: str) -> bool:
    """``a = b`` between names, to another name than ``unless_to``."""
    return (
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Name)
        and all(isinstance(target, ast.Name) and target.id != unless_to for target in statement.targets)
    )


def _norm_call(statement: ast.stmt, total: str, self_name: str) -> ast.Call | None:
    """``self.<norm>(total)``, where it is all that a statement assigns to a name or returns."""
    if not isinstance(statement, (ast.Assign, ast.Return)):
        return None
    if isinstance(statement, ast.Assign) and not all(isinstance(target, ast.Name) for target in statement.targets):
        return None
    call = statement.value
    if (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == self_name
        and not call.keywords
        and len(call.args) == 1
        and isinstance(call.args[0], ast.Name)
        and call.args[0].id == total
    ):
        return call
    return None


def _hand_to_norm(add: _Add, self_name: str) -> None:
    """Replaces the add's statements in place."""
    assign, use = add.body[add.first], add.body[add.last]
    assert isinstance(assign, ast.Assign)
    assert isinstance(assign.value, ast.BinOp)
    assert isinstance(use, (ast.Assign, ast.Return))
    assert isinstance(use.value, ast.Call)
    arguments = [use.value.func, assign.value.left, assign.value.right]
    helper = ast.Attribute(ast.Name(self_name, ast.Load()), "fused_norm_add", ast.Load())
    targets = ast.Tuple([ast.Name(_Y, ast.Store()), assign.targets[0]], ast.Store())
    add.body[add.first] = ast.Assign([targets], ast.Call(helper, arguments, []))
    use.value = ast.Name(_Y, ast.Load())
    if isinstance(use, ast.Assign):  # the name must not keep y alive longer than stock would
        add.body.insert(add.last + 1, ast.Delete([ast.Name(_Y, ast.Del())]))
