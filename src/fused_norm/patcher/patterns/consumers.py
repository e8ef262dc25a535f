"""The linears that read a norm's result: found in the forwards of a layer and of the block that they are in.

In the forward of a layer,

    residual = hidden
    hidden = self.norm(hidden)
    hidden = self.attention(hidden=hidden)

becomes, whatever the names are,

    residual = hidden
    hidden, x = self.fused_norm_passthrough(self.norm, hidden, self.attention)
    residual = x
    hidden = self.attention(hidden=hidden)

and a norm that is fused with the add in front of it is told its consumer there. In the forward of the attention,

    query = self.q_proj(hidden)
    key = self.k_proj(hidden)

becomes

    hidden, inputs = self.fused_norm_inputs(hidden)
    query = self.q_proj(inputs[0])
    key = self.k_proj(inputs[1])

if nothing but linears reads ``hidden`` there. Each of them gets an output of the norm of its own, and what reads the
norm's input after it, the residual connection, gets it from the norm: so all gradients meet in the norm's backward.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from ...kernels.triton.norm_backward import MOST_CONSUMERS
from ..adapters import name_of
from ..block import Block
from ..dataflow import Dataflow, Definition, edits_in_place, flow_of
from ..rewrite import Rewrite
from ..source import SourceError, cached_by_forward, names_in, source_of
from .calls import EditedForward, Match, call_of_own, called, make_call

_INPUTS = "_fused_norm_inputs"
_X = "_fused_norm_x"

_FACTS = ("shape", "device", "ndim", "size", "dim")
"""Attributes and methods of a tensor that do not read it, and are the same for one of another dtype."""

_CONTEXTS = (ast.With, ast.AsyncWith, ast.Try, ast.TryStar)
"""Statements that may change PyTorch's modes for those inside, autocast among them."""

_REPEATED = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class Inputs(Match):
    """An argument of a forward, and who reads it there.

    Attributes:
        definition: the forward.
        name: that of the argument.
        calls: of modules with it alone, ``self.<name>(argument)``, in the order of evaluation.
        other: how else it is read, as it is written; None where it is not.
    """

    definition: ast.FunctionDef
    name: str
    calls: list[ast.Call]
    other: str | None

    @property
    def consumers(self) -> tuple[str, ...]:
        """The attributes of the module that read the argument."""
        return tuple(map(called, self.calls))

    def is_read_in(self, block: Block) -> bool:
        """Return whether somebody reads it in this module."""
        return bool(self.consumers_in(block)) or self.other is not None

    def consumers_in(self, block: Block) -> tuple[str, ...]:
        """The consumers that a module has: an attribute that is None there, or missing, is for another config."""
        return tuple(name for name in self.consumers if block.member(name) is not None)

    def obstacle(self, block: Block) -> str | None:
        """The reason why the consumers cannot have inputs of their own; None where they can."""
        if self.other is not None:
            return f"its forward reads {self.name} in {self.other}"
        if hasattr(block.module, "gradient_checkpointing"):
            return "it may be checkpointed by itself"
        if any("autocast" in name for name in names_in(block.origin)):
            return "its forward may change autocast before its linears"
        total = 0
        for name in self.consumers_in(block):
            count = block.output_count(name)
            if not count:
                return (
                    f"{name} is no plain linear but a {name_of(type(block.member(name)))}, or other code sees its input"
                )
            total += count
        return f"its linears read {total} tensors, more than {MOST_CONSUMERS}" if total > MOST_CONSUMERS else None

    def edit(self, rewrite: Rewrite, forward: EditedForward) -> None:
        """Give every consumer an input of its own."""
        for index, call in enumerate(call for call in self.calls if called(call) in rewrite.parts):
            call.args[0] = ast.Subscript(ast.Name(_INPUTS, ast.Load()), ast.Constant(index), ast.Load())
        inputs = make_call(forward.own, "fused_norm_inputs", [ast.Name(self.name, ast.Load())])
        start = 0 if ast.get_docstring(self.definition) is None else 1
        targets: list[ast.expr] = [ast.Name(self.name, ast.Store()), ast.Name(_INPUTS, ast.Store())]
        self.definition.body.insert(start, ast.Assign([ast.Tuple(targets, ast.Store())], inputs))


@dataclass
class Consumer:
    """The one module that reads a norm's result.

    Attributes:
        module: ``self.<module>``.
        argument: the name, or the place, by which it reads it.
    """

    module: ast.Attribute
    argument: str | int

    def decide(self, layer: Block) -> bool:
        """Decide whether the linears of the module get inputs of their own; its block has a row on that."""
        block = layer.child(self.module.attr) if layer.wants_consumers else None
        if block is None:
            return False
        try:
            known = find_inputs(block.origin)
        except SourceError as error:
            return block.decide_consumers(0, (), str(error))
        index = next((i for i, one in enumerate(known) if self.argument in (i, one.name)), None)
        if index is None or not known[index].is_read_in(block):
            return False
        return block.decide_consumers(index, known[index].consumers_in(block), known[index].obstacle(block))


@dataclass
class ConsumedNorm(Match):
    """The call of a norm in a layer's forward, without an add in front of it.

    Attributes:
        statement: the one that does nothing else.
        call: the call.
        consumer: what reads its result; None where that is not one module.
        later: the names that hold its input and are read after it.
    """

    statement: ast.Assign
    call: ast.Call
    consumer: Consumer | None
    later: tuple[str, ...]

    def bypassed(self, parts: Sequence[str]) -> list[tuple[str, str]]:
        """See ``Match``."""
        read = [("consumers", self.consumer.module.attr)] if self.consumer is not None and "consumers" in parts else []
        return [("", called(self.call)), *read]

    def decide(self, block: Block, index: int, taken: Set[ast.Call]) -> None:
        """Decide whether the norm gives its consumers outputs of their own, and hands its input on.

        ``taken``: the calls of norms that are part of another rewrite.
        """
        done = block.applied_parts("consumed_norms", index)
        norm = called(self.call)
        if (
            self.call in taken
            or block.override_reason is not None
            or (block.is_sealed and done is None)
            or not block.wants_consumers
        ):
            return
        if not block.holds_norm(norm) or block.norm_row(norm, "norm", done is not None).reason is not None:
            return
        parts: tuple[str, ...] = ("consumers",) if self.consumer is not None and self.consumer.decide(block) else ()
        parts += ("input",) if self.later else ()
        if parts:
            block.rewrites.append(Rewrite("consumed_norms", index, parts))

    def edit(self, rewrite: Rewrite, forward: EditedForward) -> None:
        """Tell the norm who reads it, and have those that read its input later read what it hands on."""
        consumer = [self.consumer.module] if self.consumer is not None and "consumers" in rewrite.parts else []
        x = f"{_X}{rewrite.index}"
        self.statement.value = make_call(
            forward.own, "fused_norm_passthrough", [self.call.func, *self.call.args, *copy.deepcopy(consumer)]
        )
        self.statement.targets = [ast.Tuple([*self.statement.targets, ast.Name(x, ast.Store())], ast.Store())]
        later = self.later if "input" in rewrite.parts else ()
        handed_on: list[ast.stmt] = [ast.Assign([ast.Name(one, ast.Store())], ast.Name(x, ast.Load())) for one in later]
        forward.insert_after(self.statement, *handed_on, ast.Delete([ast.Name(x, ast.Del())]))


@cached_by_forward
def find_inputs(layer: Any) -> list[Inputs]:
    """The arguments that the forward of a class takes by place, without the instance, each with its consumers.

    Raises:
        SourceError: where the source cannot be read, or is not what runs.
    """
    definition, flow = source_of(layer).definition, flow_of(layer)
    arguments = [*definition.args.posonlyargs, *definition.args.args][1:]
    decorator = _decorator_of(layer.forward)
    return [_inputs(definition, flow, argument.arg, decorator) for argument in arguments]


def _decorator_of(forward: Any) -> str | None:
    """A decorator that gets the arguments of a forward and may look into a tensor among them; None without one."""
    while hasattr(forward, "__wrapped__"):
        module = forward.__globals__["__name__"]
        if module != "transformers.utils.deprecation":  # which looks at names
            return f"a decorator from {module}"
        forward = forward.__wrapped__
    return None


def _inputs(definition: ast.FunctionDef, flow: Dataflow, name: str, decorator: str | None) -> Inputs:
    argument = flow.argument(name)
    calls, other = [], "a function inside" if flow.is_captured(name) else decorator
    for load in flow.reads(argument):
        around = flow.parent(load)
        call = call_of_own(around, flow.own)
        is_plain = call is not None and flow.definition_of(load) is argument
        if call is not None and is_plain and not flow.is_inside(call, (*_REPEATED, *_CONTEXTS)):
            calls.append(call)
        elif not (isinstance(around, ast.Attribute) and around.attr in _FACTS):
            other = other or ast.unparse(around)
    order = list(flow.calls)
    return Inputs(definition, name, sorted(calls, key=order.index), other)


def consumer_of(flow: Dataflow, call: ast.Call) -> Consumer | None:
    """The one module that reads what a call returns: at once, or by a name that nothing else reads."""
    value: ast.AST = call
    statement = flow.parent(call)
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        made = next(iter(flow.made_by(statement)), None) if isinstance(statement.targets[0], ast.Name) else None
        loads = [] if made is None else flow.reads(made)
        if made is None or len(loads) != 1 or flow.definition_of(loads[0]) is not made or flow.is_captured(made.name):
            return None
        (value,) = loads
    around = flow.parent(value)
    if isinstance(around, ast.keyword) and around.arg is not None:
        argument: str | int = around.arg
        around = flow.parent(around)
    elif isinstance(around, ast.Call) and value in around.args:
        argument = around.args.index(value)
        if any(isinstance(one, ast.Starred) for one in around.args[:argument]):
            return None
    else:
        return None
    if not isinstance(around, ast.Call) or not flow.is_own(around.func) or flow.is_inside(around, _REPEATED):
        return None
    if flow.innermost(call, _CONTEXTS) is not flow.innermost(around, _CONTEXTS):
        return None
    return Consumer(around.func, argument)


def find_consumed_norms(flow: Dataflow, taken: list[ast.Call]) -> list[ConsumedNorm]:
    """The calls of what may be norms, one a statement, but for those that are ``taken`` by adds."""
    found = []
    for body in flow.bodies:
        for statement in body:
            if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
                continue
            call = call_of_own(statement.value, flow.own)
            if call is None or call in taken or not isinstance(statement.targets[0], ast.Name):
                continue
            later = () if flow.is_inside(call, _REPEATED) else _later(flow, body, statement, call.args[0])
            consumer = consumer_of(flow, call)
            if consumer is not None or later:
                found.append(ConsumedNorm(statement, call, consumer, later))
    return found


def _later(flow: Dataflow, body: list[ast.stmt], statement: ast.Assign, x: ast.expr) -> tuple[str, ...]:
    """The names that hold ``x`` when a statement has read it, and are read behind it; none where that is not plain."""
    held = flow.definition_of(x)
    behind = body[body.index(statement) + 1 :]
    if held is None or any(map(edits_in_place, behind)):
        return ()
    names = [held]
    for load in flow.reads(held):
        around = flow.parent(load)
        if load is not x and isinstance(around, ast.Assign) and around in body and around not in behind:
            if len(around.targets) != 1 or not isinstance(around.targets[0], ast.Name) or around.value is not load:
                return ()
            names += flow.made_by(around)
    later = []
    for name in names:
        loads = [load for load in flow.reads(name) if load is not x and not _is_copy(flow, load, names)]
        if flow.is_captured(name.name) or not all(_is_in(load, behind) for load in loads):
            return ()
        if any(flow.definition_of(load) is not name for load in loads):
            return ()
        later += [name.name] if loads else []
    return tuple(later)


def _is_copy(flow: Dataflow, load: ast.Name, names: list[Definition]) -> bool:
    """Return whether a load does nothing but give one of these definitions its value."""
    return any(one.value is load for one in names)


def _is_in(node: ast.AST, statements: list[ast.stmt]) -> bool:
    return any(node is inner for statement in statements for inner in ast.walk(statement))
