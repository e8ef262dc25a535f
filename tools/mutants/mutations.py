"""One-line faults: what may stand in the place of a node of a file's syntax tree.

Texts for people (docstrings, messages, log lines) and annotations are left alone, because no code path depends on them.
"""

from __future__ import annotations

import ast
import copy
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = Path("src/fused_norm")
FOLDERS = ("kernels", "patcher", "check")
"""The folders of the package whose lines are changed."""

_NEGATED: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_AT_THE_BOUND: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
_ARITHMETIC: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult,
}  # fmt: skip
_CASTS = {"to", "float", "detach", "contiguous", "clone", "type_as", "view", "cast"}
"""Methods that return their tensor in another form: a call of one is dropped."""
_FOR_PEOPLE = {"logger", "warn", "_explain", "print", "info", "debug", "repr", "TypeVar"}
_KEYS = ("key", "cache", "state", "signature", "fingerprint", "identity")
_BOUNDS = ("range", "tl.arange", "min", "max", "torch.arange")
_WEIGHTS = {"key without a part": 5, "reason dropped": 3, "cast dropped": 3, "arithmetic": 3, "constant": 0.5}
"""How much likelier a kind is drawn than the others: the rare ones would hardly be drawn at all."""


@dataclass(frozen=True)
class Mutant:
    """A fault in one line.

    Attributes:
        kind: what was done, such as ``"comparison"``.
        file: the path of the file in the checkout.
        function: the innermost function's name; empty at the level of the module.
        before, after: source of the node, and what stands there instead.
        number: which one it is of those in this function that are equal so far, from 0.
        line: the line of the node.
        span: first and last byte of the node in the file.
        statement: first and last line of the statement (of its head, if it has a body).
    """

    kind: str
    file: str
    function: str
    before: str
    after: str
    number: int
    line: int
    span: tuple[int, int]
    statement: tuple[int, int]

    @property
    def name(self) -> str:
        """What tells a mutant from others although lines move."""
        return f"{self.file}:{self.function}: {self.before} -> {self.after} #{self.number}"

    def applied(self, source: bytes) -> bytes:
        """Return the file's source with the fault in it."""
        return source[: self.span[0]] + self.after.encode() + source[self.span[1] :]


def mutants_of(checkout: Path, file: Path) -> list[Mutant]:
    """Return all mutants of a file whose syntax tree differs from the file's."""
    source = (checkout / file).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Mutant] = []
    numbers: Counter[tuple[str, ...]] = Counter()

    def visit(node: ast.AST, above: list[ast.AST]) -> None:
        if _is_for_people(node):
            return
        replacements = _replacements(node, above) if above and isinstance(node, ast.expr | ast.stmt) else ()
        for kind, new in replacements:
            assert isinstance(node, ast.expr | ast.stmt)
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            span = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            after = ast.unparse(ast.fix_missing_locations(new))
            if not isinstance(new, ast.Constant | ast.Name | ast.Call | ast.Subscript):
                after = f"({after})"
            statement = next(up for up in [node, *reversed(above)] if isinstance(up, ast.stmt))
            last = node.end_lineno if hasattr(statement, "body") else statement.end_lineno or node.end_lineno
            function = next((up.name for up in reversed(above) if isinstance(up, ast.FunctionDef)), "")
            before = source[span[0] : span[1]].decode()
            same = (kind, function, before, after)
            lines = (statement.lineno, last)
            found.append(Mutant(kind, str(file), function, before, after, numbers[same], node.lineno, span, lines))
            numbers[same] += 1
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list", "type_params", "msg"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        visit(child, [*above, node])

    visit(ast.parse(source), [])
    return found


def is_equal_code(mutant: Mutant, source: bytes) -> bool:
    """Return whether the fault changes nothing in the syntax tree, or cannot be parsed."""
    try:
        return ast.dump(ast.parse(mutant.applied(source))) == ast.dump(ast.parse(source))
    except SyntaxError:
        return True


def drawn(checkout: Path, count: int, seed: int, reached: Mapping[str, set[int]]) -> list[Mutant]:
    """Draw mutants of statements that tests run, in proportion to the lines of files, of several kinds in each file.

    Args:
        checkout: the folder of the project.
        count: how many, but for rounding.
        seed: of the generator.
        reached: the lines that tests run, by the path of the file in the package.
    """
    rng, chosen = random.Random(seed), []
    files = [path for folder in FOLDERS for path in (checkout / PACKAGE / folder).rglob("*.py")]
    sizes = {path.relative_to(checkout): len(path.read_bytes().splitlines()) for path in sorted(files)}
    position = rng.random()
    for file, size in sizes.items():
        position += size * count / sum(sizes.values())
        lines = reached.get(str(file.relative_to(PACKAGE)), set())
        kinds: dict[str, list[Mutant]] = defaultdict(list)
        source = (checkout / file).read_bytes()
        for mutant in mutants_of(checkout, file):
            if not lines.isdisjoint(range(mutant.statement[0], mutant.statement[1] + 1)):
                kinds[mutant.kind].append(mutant)
        order = sorted(sorted(kinds), key=lambda kind: -(rng.random() ** (1 / _WEIGHTS.get(kind, 1))))
        for i in range(int(position) if kinds else 0):
            options = kinds[order[i % len(order)]]
            if options:
                mutant = options.pop(rng.randrange(len(options)))
                chosen += [] if is_equal_code(mutant, source) else [mutant]
        position %= 1
    rng.shuffle(chosen)
    return chosen


def _is_for_people(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return bool(_FOR_PEOPLE & set(ast.unparse(node.func).split(".")))
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom)


def _with(node: ast.AST, **fields: Any) -> Any:
    new = copy.copy(node)
    vars(new).update(fields)
    return new


def _without(items: Sequence[Any], i: int) -> list[Any]:
    return [*items[:i], *items[i + 1 :]]


def _shifted(node: ast.AST | None) -> list[Any]:
    """Return an index, or a slice's bounds, one more and one less."""
    if isinstance(node, ast.Slice):
        lower, upper = _shifted(node.lower), _shifted(node.upper)
        return [*(_with(node, lower=new) for new in lower), *(_with(node, upper=new) for new in upper)]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return [ast.Constant(node.value + 1), ast.Constant(node.value - 1)]
    return []


def _replacements(node: ast.AST, above: list[ast.AST]) -> Iterator[tuple[str, Any]]:
    """Yield the kind of each fault, and what stands in the node's place."""
    parent = above[-1]
    functions = [up for up in above if isinstance(up, ast.FunctionDef)]
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for table in (_NEGATED, _AT_THE_BOUND):
            if other := table.get(type(node.ops[0])):
                yield "comparison", _with(node, ops=[other()])
    elif isinstance(node, ast.Subscript):
        yield from (("off by one", _with(node, slice=new)) for new in _shifted(node.slice))
    elif isinstance(node, ast.Call):
        yield from _replacements_of_call(node)
    elif isinstance(node, ast.BoolOp):
        yield "and/or", _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        if len(node.values) > 2:
            yield from (("and/or", _with(node, values=_without(node.values, i))) for i in range(len(node.values)))
    elif isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load) and len(node.elts) > 1:
        name = ast.unparse(parent.targets[0]) if isinstance(parent, ast.Assign) else ""
        if any(word in (name or (functions[-1].name if functions else "")).lower() for word in _KEYS):
            for i in range(len(node.elts)):
                yield "key without a part", _with(node, elts=_without(node.elts, i))
    elif isinstance(node, ast.Constant) and not isinstance(parent, ast.Subscript | ast.Slice):
        if isinstance(node.value, bool):
            yield "constant", ast.Constant(not node.value)
        elif isinstance(node.value, int | float):
            yield "constant", ast.Constant(node.value * 2 if node.value not in (0, 1) else 1 - node.value)
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        is_kernel = any("jit" in ast.unparse(name) for function in functions for name in function.decorator_list)
        if is_kernel or isinstance(node.op, ast.Sub):
            yield "arithmetic", _with(node, op=_ARITHMETIC[type(node.op)]())
    if node is getattr(parent, "test", None) or node in getattr(parent, "ifs", ()):
        yield "condition", ast.UnaryOp(ast.Not(), node)  # type: ignore[arg-type]
        yield "condition", ast.Constant(True)
    returned = functions[-1].returns if functions and isinstance(parent, ast.Return) else None
    if returned is not None and "str | None" in ast.unparse(returned) and ast.unparse(node) != "None":
        yield "reason dropped", ast.Constant(None)


def _replacements_of_call(node: ast.Call) -> Iterator[tuple[str, Any]]:
    if ast.unparse(node.func) in _BOUNDS:
        for i, argument in enumerate(node.args):
            for new in _shifted(argument):
                yield "off by one", _with(node, args=[*node.args[:i], new, *node.args[i + 1 :]])
    if isinstance(node.func, ast.Attribute) and node.func.attr in _CASTS:
        yield "cast dropped", node.func.value
    if not any(isinstance(argument, ast.Starred) for argument in node.args):
        for i in range(len(node.args) - 1):
            pair = node.args[i + 1], node.args[i]
            yield "arguments swapped", _with(node, args=[*node.args[:i], *pair, *node.args[i + 2 :]])
