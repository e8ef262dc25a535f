"""Who reads the result of a norm: the modules that take it, and those that take it from these, by their sources.

In the forward of a layer,

    hidden = self.norm(hidden)
    hidden, _ = self.attention(hidden_states=hidden, mask=mask)

the attention takes the result, and in the attention's forward,

    shape = hidden_states.shape[:-1]
    query = self.q(hidden_states).view(*shape, -1, 64)

the linear ``q`` does, and nobody else. What a name's shape, dtype or device is used for does not matter.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from .forward_source import SourceError, definition_of, self_name
from .statements import bodies, call_of_own, called_attribute

_FACTS = frozenset({"device", "dim", "dtype", "ndim", "shape", "size"})
"""Attributes of a tensor that are not its numbers."""


class Use(NamedTuple):
    """A call ``self.<attribute>(...)`` that takes a tensor, as its argument of this position or name."""

    attribute: str
    argument: int | str


def uses_of_result(layer: Any, norm: str) -> tuple[Use, ...]:
    """The calls that take what ``self.<norm>(...)`` returns in the forward of a class.

    Raises:
        SourceError: where the source cannot be read, or the result goes elsewhere too.
    """
    return _uses(layer, layer.forward, norm, None)


def uses_of_argument(module: Any, argument: int | str) -> tuple[Use, ...]:
    """The calls that take an argument of the forward of a class.

    Raises:
        SourceError: as ``uses_of_result``.
    """
    return _uses(module, module.forward, None, argument)


def _uses(module: Any, forward: Callable[..., Any], norm: str | None, argument: int | str | None) -> tuple[Use, ...]:
    found = _cached_uses(module, forward, norm, argument)
    if isinstance(found, SourceError):
        raise type(found)(str(found))
    return found


@cache
def _cached_uses(
    module: Any, forward: Callable[..., Any], norm: str | None, argument: int | str | None
) -> tuple[Use, ...] | SourceError:
    try:
        definition, function, _ = definition_of(module)
        own = self_name(function)
        if norm is not None:
            return tuple(_of_result(definition, own, norm))
        assert argument is not None
        return tuple(_of_name(definition.body, _parameter(function, argument), own, whole=True))
    except SourceError as error:
        return error.with_traceback(None)


def _parameter(function: Any, argument: int | str) -> str:
    """The name of a parameter by its position, after the instance, or by its name."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    if isinstance(argument, int):
        positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        if argument < len(positional):
            return positional[argument].name
    elif any(one.name == argument and one.kind is not one.VAR_KEYWORD for one in parameters):
        return argument
    raise SourceError(f"its forward takes no argument {argument!r}")


def _of_result(definition: ast.FunctionDef, own: str, norm: str) -> Iterator[Use]:
    calls = [node for node in ast.walk(definition) if _attribute(node, own) == norm]
    for body in bodies(definition):
        for position, statement in enumerate(body):
            call = call_of_own(getattr(statement, "value", None), own)
            if call is None or called_attribute(call) != norm or not isinstance(statement, ast.Assign):
                continue
            if len(calls) != 1:
                raise SourceError(f"{norm} is used in several places")
            (target, *more) = statement.targets
            if more or not isinstance(target, ast.Name):
                raise SourceError(f"the result of {norm} has no name")
            yield from _of_name(body[position + 1 :], target.id, own, whole=body is definition.body)
            return
    raise SourceError(f"the result of {norm} goes elsewhere")


def _of_name(statements: Sequence[ast.stmt], name: str, own: str, *, whole: bool) -> Iterator[Use]:
    """The uses of what a name holds at first. ``whole``: nothing follows the statements."""
    for statement in statements:
        loads = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id == name]
        if not loads:
            continue
        simple = isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr))
        stores = [node for node in loads if not isinstance(node.ctx, ast.Load)]
        known = {id(load) for load, _ in _uses_in(statement, name, own)}
        for load in loads:
            if isinstance(load.ctx, ast.Load) and id(load) not in known and not _is_fact(statement, load):
                raise SourceError(f"its result is read otherwise too: {_shortened(ast.unparse(statement))}")
        for _, use in _uses_in(statement, name, own):
            if not simple:
                raise SourceError(f"{use.attribute} reads its result only now and then")
            yield use
        if stores:
            if not simple:
                raise SourceError(f"{name} has another value only now and then")
            return
    if not whole:
        raise SourceError("its result may be read by what follows")


def _uses_in(statement: ast.stmt, name: str, own: str) -> list[tuple[ast.Name, Use]]:
    """The places in a statement, in order, where the name is an argument of a call of an own attribute."""
    return sorted(_unordered_uses_in(statement, name, own), key=lambda use: (use[0].lineno, use[0].col_offset))


def _unordered_uses_in(statement: ast.stmt, name: str, own: str) -> Iterator[tuple[ast.Name, Use]]:
    for node in ast.walk(statement):
        if not isinstance(node, ast.Call) or (attribute := _attribute(node.func, own)) is None:
            continue
        for position, value in enumerate(node.args):
            if isinstance(value, ast.Starred):
                break
            if isinstance(value, ast.Name) and value.id == name:
                yield value, Use(attribute, position)
        for keyword in node.keywords:
            if keyword.arg is not None and isinstance(keyword.value, ast.Name) and keyword.value.id == name:
                yield keyword.value, Use(attribute, keyword.arg)


def _is_fact(statement: ast.stmt, load: ast.Name) -> bool:
    """Return whether a name stands there for its shape, dtype or device alone."""
    return any(
        isinstance(node, ast.Attribute) and node.value is load and node.attr in _FACTS for node in ast.walk(statement)
    )


def _attribute(node: ast.AST, own: str) -> str | None:
    """``<name>`` of ``self.<name>``."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == own:
        return node.attr
    return None


def _shortened(text: str) -> str:
    line = text.splitlines()[0]
    return line if len(line) <= 80 else line[:77] + "..."
