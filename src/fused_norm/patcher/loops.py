"""The loop of a model over its layers: whether the stream goes from each layer straight to the next, and to which norm.

for layer in self.layers:
    hidden = layer(hidden, ...)
hidden = self.norm(hidden)
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from typing import Any

from .source import definition_of, self_name
from .stream import bodies, call_of_own, mentions


@dataclass(frozen=True)
class Loop:
    """A loop that does nothing to the stream but hand it from layer to layer.

    Attributes:
        layers: the attribute of the list of layers.
        norm: the attribute of the norm that takes what comes out of the last layer, None where something else does.
    """

    layers: str
    norm: str | None


@cache
def loops_of(stack: Any) -> tuple[Loop, ...]:
    """The loops over layers in the forward of a class that leave the stream alone.

    Raises:
        SourceError: where the source cannot be read, or is not what runs.
    """
    definition, function = definition_of(stack)
    own = self_name(function)
    found = []
    for body in bodies(definition):
        for position, statement in enumerate(body):
            if isinstance(statement, ast.For) and (loop := _loop(statement, body[position + 1 :], own)) is not None:
                found.append(loop)
    return tuple(found)


def _loop(statement: ast.For, after: list[ast.stmt], self_name: str) -> Loop | None:
    layers = _list_of(statement.iter, self_name)
    if layers is None or statement.orelse:
        return None
    streams = {
        inner: stream for inner in statement.body if (stream := _layer_call(inner, statement.target)) is not None
    }
    if len(streams) != 1:
        return None
    ((call, stream),) = streams.items()
    if any(mentions(inner, stream) for inner in statement.body if inner is not call):
        return None
    following = next((inner for inner in after if mentions(inner, stream)), None)
    norm = call_of_own(getattr(following, "value", None), self_name)
    takes_stream = norm is not None and isinstance(norm.args[0], ast.Name) and norm.args[0].id == stream
    return Loop(layers, norm.func.attr if takes_stream else None)  # type: ignore[union-attr]


def _list_of(node: ast.expr, self_name: str) -> str | None:
    """``<layers>`` of ``self.<layers>``, perhaps its first ones, perhaps counted: ``enumerate(self.layers[:n])``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "enumerate" and node.args:
        node = node.args[0]
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        node = node if node.slice.lower or node.slice.step else node.value
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self_name:
        return node.attr
    return None


def _layer_call(statement: ast.stmt, target: ast.expr) -> str | None:
    """``hidden`` of ``hidden = layer(hidden, ...)``, where ``layer`` is among the loop's targets."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    call, stream = statement.value, statement.targets[0]
    if not isinstance(call, ast.Call) or not isinstance(stream, ast.Name):
        return None
    if not isinstance(call.func, ast.Name) or not mentions(target, call.func.id):
        return None
    named = {word.arg: word.value for word in call.keywords}
    taken = call.args[0] if call.args else named.get("hidden_states")
    others = [*call.args[1:], *(word.value for word in call.keywords if word.value is not taken)]
    if not isinstance(taken, ast.Name) or taken.id != stream.id or any(mentions(other, stream.id) for other in others):
        return None
    return stream.id
