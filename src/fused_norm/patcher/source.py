"""The source of a forward: read once, compared with the code that runs, and compiled again after a change."""

from __future__ import annotations
import __future__

import ast
import copy
import inspect
import linecache
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from itertools import pairwise
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from torch import nn

from .probe import found_once
from .running_code import RunningCode, closed_over

_FUTURE_FLAGS = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)

_SEE_NAMES = frozenset({"eval", "exec", "locals"})

Result = TypeVar("Result")


class SourceError(Exception):
    """A forward cannot be rewritten; the message says why."""


class WrappedError(SourceError):
    """Other code has wrapped a forward."""


@dataclass(frozen=True, eq=False)
class Source:
    """The source of a forward. It is cached and never changed: changes are made to a copy.

    Attributes:
        definition: its definition, with the decorators that wrap it.
        around: the class whose private names (``self.__name``) it means, or ``_``, which has none.
        own: the name of its first argument, the instance; empty without one.
    """

    definition: ast.FunctionDef
    around: str
    own: str


_cache: WeakKeyDictionary[Any, tuple[RunningCode, dict[Any, tuple[Any, type[SourceError], str | None]]]] = (
    WeakKeyDictionary()
)
"""By forward, its code and all results for that code, which are dropped together if the code changes."""


def cached_by_forward(function: Callable[[Any], Result]) -> Callable[[Any], Result]:
    """Cache what a function returns for a class, or the SourceError it raises, while its forward runs the same code.

    The result must not hold the class or the forward, or neither would ever be freed.
    """

    @wraps(function)
    def cached(layer: Any) -> Result:
        forward = layer.forward
        if forward not in _cache or not _cache[forward][0].is_in(forward):
            _cache[forward] = RunningCode(forward), {}
        _, results = _cache[forward]
        if function not in results:
            try:
                results[function] = function(layer), SourceError, None
            except SourceError as error:
                results[function] = None, type(error), str(error)
        result, kind, message = results[function]
        if message is not None:
            raise kind(message)
        return cast(Result, result)

    return cached


@cached_by_forward
def source_of(layer: Any) -> Source:
    """The source of the forward that a class has now.

    Raises:
        SourceError: if the source cannot be read, or is not the code that runs.
    """
    function, wrappers = _unwrap(layer.forward)
    if outer := [name for name in function.__code__.co_freevars if name != "__class__"]:
        raise SourceError(f"its forward closes over {', '.join(outer)}")
    code, in_file = function.__code__, None
    try:
        lines, _ = inspect.findsource(function)
        with suppress(SyntaxError, ValueError):  # a whole file takes long, and is compiled only if this fails
            in_file = _definition_in(_without_others(lines, code.co_firstlineno), code)
        in_file = in_file or _definition_in("".join(lines), code)
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        raise SourceError(f"the source of its forward cannot be read: {error}") from error
    if in_file is None:
        raise SourceError("the source of its forward is not the code that runs")
    stock, around = in_file
    for call in ast.walk(stock):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in _SEE_NAMES:
            raise SourceError(f"its forward calls {call.func.id}, which sees the names of all that is fused")
    definition = copy.copy(stock)
    definition.decorator_list = list(_decorators_of(wrappers, stock, function))
    return Source(definition, around, next(iter(function.__code__.co_varnames), ""))


def text_of(code: CodeType) -> str | None:
    """Return the lines that a function's code was compiled from, without decorators; None if no file has them now."""
    try:
        lines, _ = inspect.findsource(code)
        found = _definition_in(_without_others(lines, code.co_firstlineno), code)
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return None if found is None else "".join(lines[found[0].lineno - 1 : found[0].end_lineno])


def _without_others(lines: list[str], line: int) -> str:
    """A file with empty lines in place of its classes and functions, except the one that contains a line.

    It keeps the imports, on which the compiled code depends.
    """
    starts = [number for number, text in enumerate(lines) if text[:1].isalpha() or text[:1] in ("@", "_")]
    starts = [now for before, now in pairwise([0, *starts]) if not lines[before].startswith("@")]
    blanked = list(lines)
    for start, end in pairwise([*starts, len(lines)]):
        if not start < line <= end and lines[start].startswith(("class ", "def ", "async ", "@")):
            blanked[start:end] = ["\n"] * (end - start)
    return "".join(blanked)


def _definition_in(text: str, code: CodeType) -> tuple[ast.FunctionDef, str] | None:
    """The function that code was compiled from, and the name of the class around it; None if the text has another."""
    definitions, codes = _parsed(text, code.co_flags & _FUTURE_FLAGS)
    return definitions.get(code.co_firstlineno) if code in codes else None  # whatever the names of their files


@lru_cache(maxsize=4)
def _parsed(text: str, flags: int) -> tuple[dict[int, tuple[ast.FunctionDef, str]], tuple[CodeType, ...]]:
    """The functions of a file by first line, each with the name of the class around it, and all code in the file."""
    tree = ast.parse(text)
    functions: dict[int, tuple[ast.FunctionDef, str]] = {}
    nodes: list[tuple[ast.AST, str]] = [(tree, "_")]
    for node, around in nodes:  # from the outside in
        if isinstance(node, ast.FunctionDef):  # whose code starts with its first decorator, if it has one
            functions.setdefault(min([node.lineno, *(part.lineno for part in node.decorator_list)]), (node, around))
        inside = node.name if isinstance(node, ast.ClassDef) else around
        nodes += ((child, inside) for child in ast.iter_child_nodes(node))
    return functions, tuple(_codes(compile(tree, "<source>", "exec", flags=flags, dont_inherit=True)))


def compiled(definition: ast.FunctionDef, layer: type[nn.Module]) -> Callable[..., Any]:
    """Compile ``definition``, a changed copy of that of the class's forward.

    The function has the namespace of the layer's own module, which gains no name.

    Raises:
        SourceError: if it does not run again.
    """
    function, _ = _unwrap(layer.forward)
    around = source_of(layer).around
    all_defaults: tuple[list[Any], list[Any]] = definition.args.defaults, definition.args.kw_defaults
    for defaults in all_defaults:  # they would be evaluated again, and might have other values by now
        defaults[:] = [node if node is None or _is_literal(node) else ast.Constant(None) for node in defaults]
    tree = ast.parse(f"class {around}: pass")
    assert isinstance(tree.body[0], ast.ClassDef)
    tree.body[0].body = [definition]
    text = ast.unparse(ast.fix_missing_locations(tree))
    # A name for each text: a class may be rewritten in several ways.
    name = f"{layer.__module__}.{layer.__qualname__}.forward"
    filename = f"<fused_norm {name}#{zlib.crc32(text.encode()):08x}>"
    # Tracebacks, debuggers and inspect show the rewritten lines.
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {}
    try:
        flags = function.__code__.co_flags & _FUTURE_FLAGS
        exec(compile(text, filename, "exec", flags=flags, dont_inherit=True), function.__globals__, namespace)
    except Exception as error:  # decorators and annotations are evaluated again, and may need what is gone
        raise SourceError(f"its source does not run again: {type(error).__name__}: {error}") from error
    forward = vars(namespace[around])[definition.name]
    forward.__qualname__ = function.__qualname__
    innermost = _unwrap(forward)[0]
    innermost.__defaults__, innermost.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    cell, stock_cell = (cells_of(either).get("__class__") for either in (innermost, function))
    if cell is not None and stock_cell is not None:
        cell.cell_contents = stock_cell.cell_contents  # the class that super() means
    return forward


def source_of_rewritten(layer: type[nn.Module]) -> str:
    """Return the source of a class's forward that ``compiled`` has made."""
    return "".join(linecache.getlines(_unwrap(layer.forward)[0].__code__.co_filename))


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def cells_of(function: FunctionType) -> dict[str, CellType]:
    """The variables of enclosing functions and classes that a function uses."""
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _decorators_of(
    wrappers: list[FunctionType], definition: ast.FunctionDef, function: FunctionType
) -> Iterator[ast.expr]:
    """The decorators that made ``wrappers``, outermost first; the others returned the function as it is."""
    decorators = iter(definition.decorator_list)
    for wrapper in wrappers:
        module = wrapper.__globals__["__name__"]
        decorator = next((decorator for decorator in decorators if _module_of(decorator, function) == module), None)
        if decorator is None:
            raise WrappedError(f"its forward is wrapped by {module}, which its source does not show")
        arguments: list[ast.expr] = []
        if isinstance(decorator, ast.Call):
            arguments = [*decorator.args, *(keyword.value for keyword in decorator.keywords)]
        if not all(map(_is_literal, arguments)):
            raise SourceError(f"its decorator {ast.unparse(decorator)} may be given something else by now")
        yield decorator


def _module_of(decorator: ast.expr, function: FunctionType) -> str | None:
    """The name of the module that defines a decorator, and so the wrappers it makes.

    Of a decorator that is an instance, as ``torch.no_grad()`` is, that is the module of what makes it callable.
    """
    name = decorator.func if isinstance(decorator, ast.Call) else decorator
    try:
        value = eval(compile(ast.Expression(name), "<decorator>", "eval"), function.__globals__)
    except Exception:  # whatever a name or attribute lookup raises
        return None
    if isinstance(value, type):
        value = next((vars(base)["__call__"] for base in value.__mro__ if "__call__" in vars(base)), value)
    return getattr(value, "__module__", None)


def _unwrap(forward: Any) -> tuple[FunctionType, list[FunctionType]]:
    """The innermost function, and the wrappers around it that its source must show.

    transformers' layers wrap the forward of each subclass for gradient checkpointing; a fused class gets that anew.
    """
    wrappers = []
    while hasattr(forward, "__wrapped__"):
        wrapper, forward = forward, forward.__wrapped__
        module = getattr(wrapper, "__globals__", {}).get("__name__")
        if module != "transformers.modeling_layers":
            wrappers.append(wrapper)
        # ``%autoreload`` writes over a wrapper, but for what it closes over and so calls.
        if isinstance(wrapper, FunctionType) and not any(value is forward for value in closed_over(wrapper)):
            raise SourceError(f"its forward is wrapped by {module}, which calls another function than it names")
    if not isinstance(forward, FunctionType):
        raise SourceError(f"its forward is a {type(forward).__name__}, not a function")
    return forward, wrappers


def names_in(layer: Any) -> frozenset[str]:
    """The names of globals and attributes that a forward uses; none if it is no function."""
    return found_once(partial(_read_names, layer), _read_names, id(layer))  # which lives as long as a survey


def _read_names(layer: Any) -> frozenset[str]:
    try:
        function, _ = _unwrap(layer.forward)
    except SourceError:
        return frozenset()
    return frozenset(function.__code__.co_names)


def parameters_of(layer: Any) -> list[inspect.Parameter]:
    """The parameters of a class's forward, the module first; none if Python cannot tell them."""
    return found_once(partial(_read_parameters, layer), _read_parameters, id(layer))


def _read_parameters(layer: Any) -> list[inspect.Parameter]:
    try:
        return [*inspect.signature(layer.forward).parameters.values()]
    except (TypeError, ValueError):
        return []


def namespace_of(layer: Any) -> dict[str, Any]:
    """The globals of a class's forward.

    Raises:
        SourceError: if the forward is no function.
    """
    return _unwrap(layer.forward)[0].__globals__


def global_of(layer: Any, name: str) -> Any:
    """Return the object that a forward means by a global name or by ``module.name``, or None.

    Raises:
        SourceError: if the forward is no function.
    """
    first, *rest = name.split(".")
    value = namespace_of(layer).get(first)
    for part in rest:
        value = getattr(value, part, None) if isinstance(value, ModuleType) else None
    return value


def member_of(module: nn.Module, name: str) -> Any:
    """Return an attribute of a module, or with ``name.0`` a module in a list of modules; or None."""
    first, *rest = name.split(".")
    value = getattr(module, first, None)
    for part in rest:
        value = value._modules.get(part) if isinstance(value, nn.Module) else None
    return value


def _codes(code: CodeType) -> Iterator[CodeType]:
    """``code`` and all code objects inside it, outermost first."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
