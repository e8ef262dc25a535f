"""Definitions and uses of the names in a forward: which statement gives a name its value, and what reads it.

In

    residual = hidden
    hidden = self.norm(hidden)
    if self.flag:
        hidden = residual + hidden
    return hidden

``hidden`` in the last line has two definitions, one of them only if ``flag`` holds, and ``residual`` has one, which is
read once. All patterns ask such questions here.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from .source import cached_by_forward, source_of

Conditions = tuple[tuple[str, bool], ...]
"""Tests of the module's own settings (``self.config.flag``, ``self.act is None``), each with its outcome."""

_CHANGING = frozenset({"training", "gradient_checkpointing"})
"""Attributes that change between calls."""

_CHOICES: Mapping[type, tuple[str, ...]] = {ast.NamedExpr: ("value",), ast.IfExp: ("body", "orelse")}
_ARITHMETIC: Mapping[type, tuple[str, ...]] = {
    **_CHOICES,
    ast.UnaryOp: ("operand",),
    ast.BinOp: ("left", "right"),
    ast.AugAssign: ("target", "value"),
}
_VIEWS: Mapping[type, tuple[str, ...]] = {
    **_CHOICES,
    **dict.fromkeys([ast.Subscript, ast.Attribute, ast.Starred], ("value",)),
    **dict.fromkeys([ast.Tuple, ast.List], ("elts",)),
    ast.AugAssign: ("target",),
}
"""The fields of an expression whose value, arithmetic or memory it has."""

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, eq=False)
class Definition:
    """A place that gives a name a value.

    Attributes:
        name: the name.
        value: the expression whose value the name has from then on; the statement ``a += b`` or the call ``a.add_(b)``
            itself; a constant for an argument that is a number by its annotation or default; None if it is anything
            else: another argument, a loop's variable, a part of what a call returns.
        statement: the statement; None for an argument.
    """

    name: str
    value: ast.AST | None
    statement: ast.stmt | None


Names = dict[str, frozenset[Definition]]


class Dataflow:
    """The definitions and uses of a function's names, its calls and its statements.

    Attributes:
        definition: the function's.
        own: the name of its first argument, the instance.
        bodies: every list of statements that belongs to the function itself, in order.
        body_of: the body that contains a statement, by statement.
        calls: every call, in the order of evaluation.
        parents: the expression or statement that directly contains a node, by node.
        arguments: the definitions of the arguments, by name.
    """

    def __init__(self, definition: ast.FunctionDef, own: str) -> None:
        self.definition, self.own = definition, own
        self.bodies = list(bodies_of(definition))
        self.calls: dict[ast.Call, None] = {}
        self.body_of = {statement: body for body in self.bodies for statement in body}
        self._by_node: dict[ast.AST, Definition] = {}
        self._definitions: dict[ast.Name, frozenset[Definition]] = {}
        self._loads: dict[Definition, dict[ast.Name, None]] = {}
        self._inside: Names = {}  # what the expressions of the statement assign
        functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        inner = [node for node in ast.walk(definition) if isinstance(node, functions) and node is not definition]
        self._captured = {node.id for function in inner for node in ast.walk(function) if isinstance(node, ast.Name)}
        self.parents = {inner: node for node in ast.walk(definition) for inner in ast.iter_child_nodes(node)}
        self.arguments = {name: Definition(name, value, None) for name, value in _arguments(definition.args)}
        self._run(definition.body, {name: frozenset([argument]) for name, argument in self.arguments.items()})
        self._locals = {*self.arguments, *(local.name for local in self._by_node.values())}

    def definition_of(self, load: ast.AST | None) -> Definition | None:
        """The definition of the value that a load reads; None if there are several, or it is of no local name."""
        definitions = self._definitions.get(load, ()) if isinstance(load, ast.Name) else ()
        return next(iter(definitions)) if len(definitions) == 1 else None

    def made_by(self, statement: ast.stmt) -> list[Definition]:
        """The definitions that a statement makes."""
        return [definition for definition in self._by_node.values() if definition.statement is statement]

    def reads(self, definition: Definition) -> list[ast.Name]:
        """The loads that may read a definition, including ``a`` of ``a += b`` and excluding ``del a``."""
        return [load for load in self._loads.get(definition, ()) if not isinstance(load.ctx, ast.Del)]

    def innermost(self, node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> ast.AST | None:
        """The innermost node of one of these kinds that contains a node, or None."""
        while (node := self.parents.get(node, ast.Pass())) in self.parents:
            if isinstance(node, kinds):
                return node
        return None

    def is_read_only_in(self, definition: Definition, *parts: ast.AST) -> bool:
        """Return whether only these expressions use a definition; an inner function might do so at any time."""
        inside = {node for part in parts for node in ast.walk(part)}
        return not self.is_captured(definition.name) and inside.issuperset(self._loads[definition])

    def is_captured(self, *names: str) -> bool:
        """Return whether an inner function may read or write one of the names, whenever it is called."""
        return not self._captured.isdisjoint(names)

    def is_local(self, name: str) -> bool:
        """Return whether a name is an argument or a variable of the function."""
        return name in self._locals

    def is_own(self, node: ast.AST | None) -> TypeGuard[ast.Attribute]:
        """Return whether an expression is ``self.<name>``."""
        return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self.own

    def conditions(self, *nodes: ast.AST) -> Conditions:
        """The conditions on settings of the module under which nodes are reached; none for those of inner functions."""
        conditions: list[tuple[str, bool]] = []
        for node in nodes:
            inside: list[Conditions] = []
            while (parent := self.parents.get(node)) is not None:
                if isinstance(parent, (ast.If, ast.IfExp)) and node is not parent.test:
                    body = parent.body if isinstance(parent.body, list) else [parent.body]
                    inside.insert(0, self._settings(parent.test, node in body))
                elif isinstance(parent, _DEFINITIONS) and parent in self.parents:
                    inside = []
                    break
                node = parent
            conditions += itertools.chain(*inside)
        return tuple(dict.fromkeys(conditions))

    def between(self, first: ast.stmt | None, last: ast.stmt) -> list[ast.stmt] | None:
        """The statements between two of the same body; None if ``first`` is not before ``last`` in that body."""
        body = self.body_of[last]
        if first is None or self.body_of.get(first) is not body or body.index(first) >= body.index(last):
            return None
        return body[body.index(first) + 1 : body.index(last)]

    def after(self, statement: ast.stmt) -> list[ast.stmt]:
        """The statements that follow another one in its body."""
        body = self.body_of[statement]
        return body[body.index(statement) + 1 :]

    def is_number(self, node: ast.AST | None) -> bool:
        """Return whether a value is a number by the source, or of a global name, which no tensor of a model has."""
        for source, is_end in self._sources(node, _ARITHMETIC, through_methods=False).items():
            match source:
                case ast.Constant(int() | float()) | ast.Subscript(value=ast.Attribute(attr="shape")) | ast.Name():
                    continue
                case ast.Call(func=ast.Attribute(attr="size" | "dim" | "numel") | ast.Name("len" | "int" | "float")):
                    continue
            if is_end:
                return False
        return True

    def may_change(self, tensor: ast.expr, parts: Iterable[ast.AST]) -> bool:
        """Return whether code may write into a tensor: by any edit in place, or in a call that takes the tensor.

        Functions of modules (``torch.cat``) write only if their name or their arguments say so.
        """
        parts = list(parts)
        if any(edits_in_place(part) for part in parts):
            return True
        memory = self._memory(tensor, with_whole=True)
        return any(
            memory & self._memory(argument, with_whole=False)
            for part in parts
            for call in ast.walk(part)
            if isinstance(call, ast.Call) and (self.is_own(call.func) or isinstance(call.func, ast.Name))
            for argument in (*call.args, *(keyword.value for keyword in call.keywords))
        )

    def _memory(self, node: ast.AST, *, with_whole: bool) -> set[Definition | ast.AST | None]:
        """The expressions and definitions whose memory a value may share, as a view or an alias.

        ``with_whole``: if the value was unpacked from a call, include what the call cut into parts.
        """
        sources = self._sources(node, _VIEWS, through_methods=True, with_whole=with_whole)
        names = (name for name in sources if isinstance(name, ast.Name))
        return {*sources, *(definition for name in names for definition in self._definitions.get(name, ()))} - {None}

    def _sources(
        self,
        node: ast.AST | None,
        fields: Mapping[type, tuple[str, ...]],
        *,
        through_methods: bool,
        with_whole: bool = False,
    ) -> dict[ast.AST | None, bool]:
        """Everything that a value may come from, each with whether it comes from nothing else; None if unknown.

        ``fields``: of kinds of expressions, the fields that a value passes through; ``through_methods``: any method but
        the module's own may return what it is called on; ``with_whole``: a part of a tuple comes from it all.
        """
        seen: dict[ast.AST | None, bool] = {}
        nodes = [node]
        for source in nodes:  # grows meanwhile
            if source in seen:
                continue
            next_nodes: list[ast.AST | None] | None = None
            match source:
                case ast.Name() if self.is_local(source.id):
                    definitions = self._definitions.get(source, ())
                    next_nodes = [part.value for part in definitions] or [None]
                    cuts = (part.statement for part in definitions if with_whole and part.value is None)
                    next_nodes += [cut.value for cut in cuts if isinstance(cut, ast.Assign)]
                case ast.Call(func=ast.Attribute(value=tensor)) if through_methods and not self.is_own(source.func):
                    next_nodes = [tensor]
                case _ if type(source) in fields:
                    values = (getattr(source, field) for field in fields[type(source)])
                    next_nodes = [part for value in values for part in (value if isinstance(value, list) else [value])]
            seen[source] = next_nodes is None
            nodes += next_nodes or ()
        return seen

    def _run(self, body: list[ast.stmt], names: Names) -> Names:
        """Walk through statements; return the definitions of names afterwards."""
        for statement in body:
            self._inside = {}
            names = self._statement(statement, names)
        return names

    def _statement(self, statement: ast.stmt, names: Names) -> Names:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return names | {statement.name: frozenset([self._define(statement, statement.name, None, statement)])}
            case ast.Assign() | ast.AnnAssign() if statement.value is not None:
                self._read(statement.value, names)
                names = names | self._inside
                for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                    names = self._store(target, statement.value, statement, names)
                return names
            case ast.AugAssign():
                self._read(statement.value, names)
                if isinstance(statement.target, ast.Name):
                    self._note(statement.target, names)
                return self._store(statement.target, statement, statement, names | self._inside)
            case ast.If():
                self._read(statement.test, names)
                names = names | self._inside
                return _joined(self._run(statement.body, names), self._run(statement.orelse, names))
            case ast.For() | ast.AsyncFor() | ast.While():
                for _ in range(2):  # the second turn reads what the first one leaves in names
                    self._read(statement.test if isinstance(statement, ast.While) else statement.iter, names)
                    inside = names | self._inside
                    if not isinstance(statement, ast.While):
                        inside = self._store(statement.target, None, statement, inside)
                    names = _joined(names, self._run(statement.body, inside))
                return _joined(names, self._run(statement.orelse, names))
            case ast.With() | ast.AsyncWith():
                for item in statement.items:
                    self._read(item.context_expr, names)
                    if item.optional_vars is not None:
                        names = self._store(item.optional_vars, None, statement, names)
                return self._run(statement.body, names | self._inside)
            case ast.Try() | ast.TryStar():
                after = self._run(statement.body, names)
                for handler in statement.handlers:
                    after = _joined(after, self._run(handler.body, _joined(names, after)))
                return self._run(statement.finalbody, self._run(statement.orelse, after))
            case ast.Match():
                return self._match(statement, names)
        for part in ast.iter_child_nodes(statement):
            self._read(part, names)
            if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "add_":
                names = self._store(part.func.value, part, statement, names)
        return names | self._inside

    def _match(self, statement: ast.Match, names: Names) -> Names:
        self._read(statement.subject, names)
        names = after = names | self._inside
        for case in statement.cases:
            inside = dict(names)
            for node in ast.walk(case.pattern):
                name = getattr(node, "rest" if isinstance(node, ast.MatchMapping) else "name", None)
                if isinstance(name, str):
                    inside[name] = frozenset([self._define(node, name, None, statement)])
            if case.guard is not None:
                self._read(case.guard, inside)
            after = _joined(after, self._run(case.body, inside | self._inside))
        return after

    def _settings(self, test: ast.expr, truth: bool) -> Conditions:
        """Return the conditions that follow if a test has this outcome."""
        match test:
            case ast.UnaryOp(op=ast.Not()):
                return self._settings(test.operand, not truth)
            case ast.BoolOp() if isinstance(test.op, ast.And) is truth:  # each operand has this outcome
                return tuple(condition for operand in test.values for condition in self._settings(operand, truth))
        return ((ast.unparse(test), truth),) if self._is_of_settings(test) else ()

    def _is_of_settings(self, test: ast.expr) -> bool:
        """Return whether a test only reads attributes of the module and compares them with constants."""
        match test:
            case ast.Attribute(value, name) if name not in _CHANGING:
                return self.is_own(test) or self._is_of_settings(value)
            case ast.UnaryOp(op=ast.Not()):
                return self._is_of_settings(test.operand)
            case ast.BoolOp():
                return all(map(self._is_of_settings, test.values))
            case ast.Compare(left, [ast.Is() | ast.IsNot() | ast.Eq() | ast.NotEq()], [ast.Constant()]):
                return self._is_of_settings(left)
        return False

    def _read(self, node: ast.AST, names: Names) -> None:
        """Note the loads and calls in an expression."""
        for part in ast.iter_child_nodes(node):
            self._read(part, names)
        match node:
            case ast.Name(ctx=ast.Load() | ast.Del()):
                self._note(node, names | self._inside)
            case ast.NamedExpr():
                definition = self._define(node.target, node.target.id, node.value, None)
                self._inside = self._inside | {node.target.id: frozenset([definition])}
            case ast.Call():
                self.calls[node] = None

    def _note(self, load: ast.Name, names: Names) -> None:
        definitions = names.get(load.id, frozenset())
        self._definitions[load] = self._definitions.get(load, frozenset()) | definitions
        for definition in definitions:
            self._loads.setdefault(definition, {})[load] = None

    def _define(self, key: ast.AST, name: str, value: ast.AST | None, statement: ast.stmt | None) -> Definition:
        """The definition that a node makes; the same one in every turn of a loop."""
        definition = self._by_node.setdefault(key, Definition(name, value, statement))
        self._loads.setdefault(definition, {})
        return definition

    def _store(self, target: ast.expr, value: ast.AST | None, statement: ast.stmt, names: Names) -> Names:
        """The definitions of names after an assignment; ``value`` is None if it is unknown."""
        match target, value:
            case ast.Name(), _:
                key = target if isinstance(target.ctx, ast.Store) else value
                assert key is not None
                return names | {target.id: frozenset([self._define(key, target.id, value, statement)])}
            case ast.Starred(), _:
                return self._store(target.value, None, statement, names)
            case ((ast.Tuple() | ast.List()), _):
                values: Sequence[ast.expr | None] = [None] * len(target.elts)
                if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
                    is_starred = any(isinstance(part, ast.Starred) for part in (*target.elts, *value.elts))
                    values = values if is_starred else value.elts
                for part, its_value in zip(target.elts, values, strict=True):
                    names = self._store(part, its_value, statement, names)
                return names
        self._read(target, names)
        return names


@cached_by_forward
def flow_of(layer: Any) -> Dataflow:
    """The definitions and uses in the forward that a class has now.

    Raises:
        SourceError: if the source cannot be read, or is not what runs.
    """
    source = source_of(layer)
    return Dataflow(source.definition, source.own)


def may_hold(conditions: Conditions, module: Any) -> bool:
    """Return whether conditions hold with a module's settings now, or cannot be evaluated."""
    for test, truth in conditions:
        with contextlib.suppress(Exception):  # of a property, or of what a value makes of a comparison
            if bool(eval(test, {}, defaultdict(lambda: module))) is not truth:  # its only name is the instance
                return False
    return True


def _arguments(arguments: ast.arguments) -> Iterator[tuple[str, ast.AST | None]]:
    """The names of a function's arguments, each with a constant if its annotation or default is a number."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: dict[ast.arg, ast.expr | None] = dict(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    defaults |= dict(zip(reversed(positional), reversed(arguments.defaults), strict=False))
    for argument in (node for node in ast.walk(arguments) if isinstance(node, ast.arg)):
        match argument.annotation, defaults.get(argument):
            case (ast.Name("int" | "float"), _) | (_, ast.Constant(int() | float())):
                yield argument.arg, ast.Constant(0)
            case _:
                yield argument.arg, None


def bodies_of(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements that belongs to this function itself."""
    for field in ("body", "orelse", "finalbody"):
        body = getattr(node, field, None)
        if isinstance(body, list):
            yield body
            for statement in body:
                if not isinstance(statement, _DEFINITIONS):
                    yield from bodies_of(statement)
    for inner in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield from bodies_of(inner)


def _joined(a: Names, b: Names) -> Names:
    """The definitions of names after two paths through the code meet."""
    return {name: a.get(name, frozenset()) | b.get(name, frozenset()) for name in a | b}


def mentions(node: ast.AST, *names: str) -> bool:
    """Return whether any of the names occurs in a statement."""
    return any(isinstance(inner, ast.Name) and inner.id in names for inner in ast.walk(node))


def edits_in_place(part: ast.AST) -> bool:
    """Return whether code may write into a tensor: ``h *= a``, ``h[i] = a``, ``h.add_(a)``, ``f(a, out=h)``."""
    for node in ast.walk(part):
        match node:
            case ast.AugAssign() | ast.Subscript(ctx=ast.Store()):
                return True
            case ast.Call(keywords=keywords) if any(keyword.arg in ("out", "inplace") for keyword in keywords):
                return True
            case ast.Call(func=ast.Attribute(attr=name)) if name.endswith("_") and not name.endswith("__"):
                return True
    return False


def computed(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of an expression that compute, in the order of evaluation; not names, attributes and constants."""
    match node:
        case ast.Name() | ast.Constant() | ast.operator() | ast.expr_context():
            return
        case ast.Attribute() | ast.Starred() | ast.keyword() | ast.Subscript() | ast.Tuple() | ast.List():
            for part in ast.iter_child_nodes(node):
                yield from computed(part)
        case ast.Call() | ast.BinOp():
            for part in ast.iter_child_nodes(node):
                yield from computed(part)
            yield node
        case _:  # parts of it may never be evaluated
            yield node


def computes_nothing(test: ast.expr) -> bool:
    """Return whether a test only reads names and attributes, so that evaluating it twice has no effect."""
    match test:
        case ast.Name() | ast.Constant() | ast.Attribute() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            plain = True
        case ast.Compare(ops=ops):
            plain = all(isinstance(op, (ast.Is, ast.IsNot)) for op in ops)
        case _:
            return False
    return plain and all(computes_nothing(part) for part in ast.iter_child_nodes(test) if isinstance(part, ast.expr))
