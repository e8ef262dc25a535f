"""Calls of an instance's own modules and methods, and how patterns recognise and edit them in a forward."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import nn

from ...spec import Kind
from ..block import Block
from ..dataflow import bodies_of
from ..fused_block import Rewrite
from ..patch_report import Site
from ..source import global_of


@dataclass(frozen=True)
class Callee:
    """What a call calls: an attribute of the module, ``norms.0`` for a module in a list, or a global function.

    Attributes:
        name: its name.
        is_function: it is a global function.
    """

    name: str
    is_function: bool = False

    def resolve(self, block: Block) -> Any:
        """Return the member of a module, or the global of its forward, that has this name."""
        return global_of(block.origin, self.name) if self.is_function else block.member(self.name)


class Part:
    """Base of what is found in a forward; it prints its nodes as source."""

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={_shown(value)}' for name, value in values.items())})"


class Patterns(SimpleNamespace):
    """The matches in a forward, made of the nodes of its tree: a list for each pattern, by its name."""

    def fused_by(self, rewrites: Iterable[Rewrite]) -> list[tuple[Match, Rewrite]]:
        """The match of each rewrite, and the rewrite."""
        return [(getattr(self, rewrite.pattern)[rewrite.index], rewrite) for rewrite in rewrites]

    def norm_calls(self, block: Block) -> set[ast.Call]:
        """The calls of norms that are already part of a rewrite of a module: none is part of two."""
        matches = self.fused_by(block.rewrites)
        return {call for match, rewrite in matches for call in match.norm_calls(rewrite.parts)}


class Match(Part):
    """Base of the patterns: what each of them matches in a forward, how it is decided on, and how it is edited.

    Attributes:
        pattern: the name of the pattern, as ``Rewrite`` has it.
        kind: of its rows, if ``may_be_in`` tells of its sites.
        is_named: a name that ``may_be_in`` goes by tells that there is a site, even if the source cannot be read.
        edits_first: it is edited before what other patterns match, which pass on what it makes.
    """

    pattern: ClassVar[str]
    kind: ClassVar[Kind | None] = None
    is_named: ClassVar[bool] = False
    edits_first: ClassVar[bool] = False

    @classmethod
    def find(cls, layer: Any, found: Patterns) -> Sequence[Match]:
        """The matches in the forward of a class, in order; ``found``: those of the patterns before this one.

        Raises:
            SourceError: if the source cannot be read, or is not what runs.
        """
        raise NotImplementedError

    @classmethod
    def may_be_in(cls, module: nn.Module) -> bool:
        """Return whether a module may have a site of its own, without a norm, by the names that its forward uses."""
        return False

    @classmethod
    def decide_all(cls, block: Block, found: Patterns) -> Iterator[Site]:
        """The rows of the matches in a module with this forward; those to be fused join the rewrites of the block."""
        for index, match in enumerate(getattr(found, cls.pattern)):
            yield from match.decide(block, index, found)

    def decide(self, block: Block, index: int, found: Patterns) -> Iterable[Site]:
        """The rows of one match, the ``index``-th of its pattern, as ``decide_all`` gives them."""
        return ()

    def edit(self, rewrite: Rewrite, forward: EditedForward) -> None:
        """Put the fused call in the place of what this matches."""
        raise NotImplementedError

    def functions(self, layer: Any, parts: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """The functions of the forward's module that a rewrite of these parts replaces, recognised.

        Each comes with the attribute of the fused class that lists it. A function that is no longer one is None.
        """
        return iter(())

    def norm_calls(self, parts: Sequence[str]) -> list[ast.Call]:
        """The calls of norms, or of dropouts, that a rewrite of these parts replaces."""
        return []

    def bypassed(self, parts: Sequence[str]) -> list[str]:
        """The names of the norms and the activation that a rewrite of these parts computes without a call."""
        return []

    def fused_sites(self, parts: Sequence[str]) -> Iterator[tuple[Kind | None, str]]:
        """The sites that a rewrite of these parts fuses: their kind, and the name of a norm or nothing.

        The kind of a norm that has no site in the forward, as one of heads alone, is None.
        """
        yield from [(self.kind, "")] if self.kind is not None else [(None, name) for name in self.bypassed(parts)]


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return f"`{ast.unparse(value)}`" if isinstance(value, ast.AST) else repr(value)


def call_of_own(node: ast.AST | None, own: str) -> ast.Call | None:
    """``node`` if it is ``self.<name>(argument)`` or ``self.<name>[<number>](argument)``, else None."""
    match node:
        case ast.Call(
            ast.Attribute(ast.Name(instance)) | ast.Subscript(ast.Attribute(ast.Name(instance)), ast.Constant(int())),
            [argument],
            [],
        ) if instance == own and not isinstance(argument, ast.Starred):
            return node
    return None


def callee_name(call: ast.Call) -> str:
    """``<name>`` or ``<name>.<number>`` of such a call."""
    match call.func:
        case ast.Subscript(ast.Attribute(attr=name), ast.Constant(number)):
            return f"{name}.{number!r}"
        case ast.Attribute(attr=name):
            return name
    raise AssertionError(ast.unparse(call))


def is_name(node: ast.AST | None, name: str) -> bool:
    """Return whether an expression is this name."""
    return isinstance(node, ast.Name) and node.id == name


@dataclass(frozen=True)
class EditedForward:
    """A copy of a forward's definition, which rewrites edit one after the other.

    An edit may move an expression to another statement, so every edit looks up where its expression is.

    Attributes:
        definition: the copy.
        own: the name of its first argument, the instance.
    """

    definition: ast.FunctionDef
    own: str

    def code(self, source: str, **nodes: ast.expr) -> Any:
        """Parse an expression or a statement, with nodes in the place of their names; ``self`` is the instance."""
        (statement,) = ast.parse(source).body
        nodes["self"] = ast.Name(self.own, ast.Load())
        for name in [node for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id in nodes]:
            self.replace(name, nodes[name.id], statement)
        return statement.value if isinstance(statement, ast.Expr) else statement

    def insert_before(self, node: ast.AST, *statements: ast.stmt) -> None:
        """Insert statements before the one that is ``node``, or contains it in an expression."""
        body, index = self._place_of(node)
        body[index:index] = statements

    def insert_after(self, statement: ast.stmt, *statements: ast.stmt) -> None:
        """Insert statements after another one."""
        body, index = self._place_of(statement)
        body[index + 1 : index + 1] = statements

    def remove(self, statement: ast.stmt) -> None:
        """Remove a statement."""
        body, index = self._place_of(statement)
        del body[index]

    def replace(self, old: ast.expr, new: ast.expr, code: ast.AST | None = None) -> None:
        """Put ``new`` in every place of ``old``, in the definition or in other ``code``."""
        for node in ast.walk(code or self.definition):
            for field, value in ast.iter_fields(node):
                if value is old:
                    setattr(node, field, new)
                elif isinstance(value, list):
                    value[:] = [new if item is old else item for item in value]

    def _place_of(self, node: ast.AST) -> tuple[list[ast.stmt], int]:
        """The body with the innermost statement that is or contains ``node``, and that statement's index."""
        *_, place = (
            (body, index)
            for body in bodies_of(self.definition)
            for index, statement in enumerate(body)
            if any(node is part for part in ast.walk(statement))
        )
        return place
