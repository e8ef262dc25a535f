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

and a norm that is fused with the add before it is told its consumer there. In the forward of the attention,

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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...kernels.norm import (
    RMS_NORM_FOR_CONSUMERS,
)
from ...kernels.norm_kernels import MOST_CONSUMERS
from ..adapters import ADAPTERS, why_unfused
from ..block import Block
from ..dataflow import Dataflow, edits_in_place, flow_of
from ..four_bit import LINEARS_4BIT
from ..fused_block import Rewrite, runtime
from ..fused_norm_module import spec_and_weights
from ..hooks import are_plain_calls, name_of
from ..linear_inputs import ConsumerOutputs, ConsumerSpec, called_by, consumer_spec
from ..source import SourceError, cached_by_forward, names_in
from .calls import EditedForward, Match, Part, Patterns, call_of_own, callee_name

_INPUTS = "_fused_norm_inputs"
_X = "_fused_norm_x"

_METADATA = ("shape", "device", "ndim", "size", "dim")
"""Attributes and methods of a tensor that do not read its values, and are the same in another dtype."""

_CONTEXTS = (ast.With, ast.AsyncWith, ast.Try, ast.TryStar)
"""Statements that may change PyTorch's modes for those inside, autocast among them."""

_REPEATED = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(repr=False)
class Inputs(Match):
    """An argument of a forward, and what reads it there.

    Attributes:
        name: the argument's name.
        calls: the calls ``self.<name>(argument)`` of modules, in the order of evaluation.
        other: the source of the first other use, or None.

    The parts of a rewrite are the attributes of the linears.
    """

    pattern, edits_first = "inputs", True

    name: str
    calls: list[ast.Call]
    other: str | None

    @classmethod
    def find(cls, layer: Any, found: Patterns) -> list[Inputs]:
        """See ``Match``."""
        return find_inputs(layer)

    def consumers_in(self, block: Block) -> tuple[str, ...]:
        """The attributes that read the argument in a module: one that is None or missing belongs to another config."""
        return tuple(name for name in map(callee_name, self.calls) if block.member(name) is not None)

    def why_shared(self, block: Block) -> str | None:
        """Return why the consumers cannot have inputs of their own, or None."""
        if self.other is not None:
            return f"its forward reads {self.name} in {self.other}"
        if not are_plain_calls(block.module):
            return "other code sees its calls"
        if hasattr(block.module, "gradient_checkpointing"):
            return "it may be checkpointed on its own"
        if any("autocast" in name for name in names_in(block.origin)):
            return "its forward may change autocast before its linears"
        total = 0
        for name in self.consumers_in(block):
            count = _tensors_read_by(name, block)
            if not count:
                kind = type(block.member(name))
                if kind is nn.Linear:
                    return f"other code sees the input of its {name}"
                return f"{name} is no plain linear but a {name_of(kind)}, or other code sees its input"
            total += count
        return f"its linears read {total} tensors, more than {MOST_CONSUMERS}" if total > MOST_CONSUMERS else None

    def edit(self, rewrite: Rewrite, forward: EditedForward) -> None:
        """Give every consumer an input of its own."""
        for index, call in enumerate(call for call in self.calls if callee_name(call) in rewrite.parts):
            call.args[0] = forward.code(f"{_INPUTS}[{index}]")
        start = 0 if ast.get_docstring(forward.definition) is None else 1
        source = f"{self.name}, {_INPUTS} = self.fused_norm_inputs({self.name})"
        forward.definition.body.insert(start, forward.code(source))


def _tensors_read_by(name: str, block: Block) -> int:
    """Return the number of tensors that a linear of a module will read as its input; 0 if it is not plain."""
    linear, fused = block.member(name), tuple[type[nn.Module], ...]()
    feature = next((feature for feature in (LINEARS_4BIT, ADAPTERS) if feature.is_site(linear)), None)
    if feature is not None:
        if block.why_left_out(feature.kind, linear) is not None or (feature is ADAPTERS and why_unfused(linear)):
            return 0
        fused = (type(linear),)
    called = called_by([linear], fused=fused)
    return len(called) if called is not None and are_plain_calls(*called) else 0


@dataclass(repr=False)
class Consumer(Part):
    """The one module that reads a norm's result.

    Attributes:
        module: ``self.<module>``.
        argument: the name or the position of the argument that is the result.
    """

    module: ast.Attribute
    argument: str | int

    def decide(self, layer: Block) -> bool:
        """Decide whether the linears of the module get inputs of their own; its block has a row on that."""
        block = layer.child(self.module.attr) if layer.wants_consumers else None
        if block is None:
            return False
        try:
            all_inputs = find_inputs(block.origin)
        except SourceError as error:
            return block.decide_consumers(0, (), str(error))
        for index, inputs in enumerate(all_inputs):
            if self.argument in (index, inputs.name):
                consumers = inputs.consumers_in(block)
                is_read = bool(consumers) or inputs.other is not None
                return is_read and block.decide_consumers(index, consumers, inputs.why_shared(block))
        return False


@dataclass(repr=False)
class ConsumedNorm(Match):
    """The call of a norm in a layer's forward, without an add before it.

    Attributes:
        statement: the statement, which does nothing else.
        call: the call.
        consumer: the one module that reads its result, or None.
        later: the names that hold its input and are read after it.

    The parts of a rewrite are ``shared_inputs`` and ``input``, if there are such names.
    """

    pattern = "consumed_norms"

    statement: ast.Assign
    call: ast.Call
    consumer: Consumer | None
    later: tuple[str, ...]

    @classmethod
    def find(cls, layer: Any, found: Patterns) -> list[ConsumedNorm]:
        """The calls of what may be norms, each alone in a statement, except those that take the sum of an add."""
        flow, norms = flow_of(layer), []
        taken = [add.after.call for add in found.adds if add.after is not None]
        for statement in flow.body_of:
            match statement:
                case ast.Assign([ast.Name()], value) if (call := call_of_own(value, flow.own)) and call not in taken:
                    later = () if flow.innermost(call, _REPEATED) else _later(flow, statement, call.args[0])
                    consumer = consumer_of(flow, call)
                    if consumer is not None or later:
                        norms.append(ConsumedNorm(statement, call, consumer, later))
        return norms

    def bypassed(self, parts: Sequence[str]) -> list[str]:
        """See ``Match``."""
        return [callee_name(self.call)]

    def decide(self, block: Block, index: int, found: Patterns) -> tuple[()]:
        """Decide whether the norm gives its consumers outputs of their own, and passes its input through."""
        norm = callee_name(self.call)
        if self.call in found.norm_calls(block) or block.why_overridden is not None or not block.wants_consumers:
            return ()
        if not block.holds_norm(norm) or block.norm_row(norm, "norm").reason is not None:
            return ()
        parts: tuple[str, ...] = ("shared_inputs",) if self.consumer is not None and self.consumer.decide(block) else ()
        parts += ("input",) if self.later else ()
        if parts:
            block.rewrites.append(Rewrite("consumed_norms", index, parts, what="shared_inputs"))
        return ()

    def edit(self, rewrite: Rewrite, forward: EditedForward) -> None:
        """Name the consumer in the call of the norm, and let later reads of its input read what it passes through."""
        x, nodes = f"{_X}{rewrite.index}", {"NORM": self.call.func, "INPUT": self.call.args[0]}
        if "shared_inputs" in rewrite.parts and self.consumer is not None:
            nodes["CONSUMER"] = copy.deepcopy(self.consumer.module)
        self.statement.targets = [ast.Tuple([*self.statement.targets, ast.Name(x, ast.Store())], ast.Store())]
        self.statement.value = forward.code(f"self.fused_norm_passthrough({', '.join(nodes)})", **nodes)
        later = self.later if "input" in rewrite.parts else ()
        forward.insert_after(
            self.statement, *(forward.code(f"{name} = {x}") for name in later), forward.code(f"del {x}")
        )


@cached_by_forward
def find_inputs(layer: Any) -> list[Inputs]:
    """The positional arguments of a class's forward, without the instance, each with its consumers.

    Raises:
        SourceError: if the source cannot be read, or is not what runs.
    """
    flow = flow_of(layer)
    arguments = flow.definition.args
    forward, decorator = layer.forward, None
    while decorator is None and hasattr(forward, "__wrapped__"):
        module = forward.__globals__["__name__"]
        if module != "transformers.utils.deprecation":  # it looks at names; others may look into a tensor
            decorator = f"a decorator from {module}"
        forward = forward.__wrapped__
    order, inputs = list(flow.calls), []
    for name in [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)][1:]:
        calls, other = [], "a function inside" if flow.is_captured(name) else decorator
        for load in flow.reads(flow.arguments[name]):
            user = flow.parents[load]
            call = call_of_own(user, flow.own) if flow.definition_of(load) is flow.arguments[name] else None
            if call is not None and flow.innermost(call, (*_REPEATED, *_CONTEXTS)) is None:
                calls.append(call)
            elif not (isinstance(user, ast.Attribute) and user.attr in _METADATA):
                other = other or ast.unparse(user)
        inputs.append(Inputs(name, sorted(calls, key=order.index), other))
    return inputs


def consumer_of(flow: Dataflow, call: ast.Call) -> Consumer | None:
    """The one module that reads what a call returns, directly or by a name that nothing else reads; or None."""
    value: ast.AST = call
    statement = flow.parents[call]
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        definition = next(iter(flow.made_by(statement)), None) if isinstance(statement.targets[0], ast.Name) else None
        loads = [] if definition is None else flow.reads(definition)
        if (
            definition is None
            or len(loads) != 1
            or flow.definition_of(loads[0]) is not definition
            or flow.is_captured(definition.name)
        ):
            return None
        (value,) = loads
    user = flow.parents[value]
    if isinstance(user, ast.keyword) and user.arg is not None:
        argument: str | int = user.arg
        user = flow.parents[user]
    elif isinstance(user, ast.Call) and value in user.args:
        argument = user.args.index(value)
        if any(isinstance(before, ast.Starred) for before in user.args[:argument]):
            return None
    else:
        return None
    if not isinstance(user, ast.Call) or not flow.is_own(user.func) or flow.innermost(user, _REPEATED):
        return None
    if flow.innermost(call, _CONTEXTS) is not flow.innermost(user, _CONTEXTS):
        return None
    return Consumer(user.func, argument)


def _later(flow: Dataflow, statement: ast.Assign, x: ast.expr) -> tuple[str, ...]:
    """The names that hold ``x``, the input of a statement, and are read only after it; none if any use is another."""
    body, after = flow.body_of[statement], flow.after(statement)
    definition = flow.definition_of(x)
    if definition is None or any(map(edits_in_place, after)):
        return ()
    names = [definition]
    for load in flow.reads(definition):
        user = flow.parents[load]
        if load is not x and isinstance(user, ast.Assign) and user in body and user not in after:
            if len(user.targets) != 1 or not isinstance(user.targets[0], ast.Name) or user.value is not load:
                return ()
            names += flow.made_by(user)
    nodes_after = {node for later in after for node in ast.walk(later)}
    copied = [name.value for name in names]
    later = []
    for name in names:
        loads = [load for load in flow.reads(name) if load is not x and load not in copied]
        if flow.is_captured(name.name) or not nodes_after.issuperset(loads):
            return ()
        if any(flow.definition_of(load) is not name for load in loads):
            return ()
        later += [name.name] if loads else []
    return tuple(later)


@runtime
def fused_norm_passthrough(self: Any, norm: Any, x: Any, consumer: Any = None) -> tuple[Any, Any]:
    """Return ``(norm(x), x)``, for ``consumer`` the norm's outputs; the gradient of this x joins the norm's."""
    if not torch.compiler.is_compiling():
        spec, weight = spec_and_weights(norm)
        consumers = None if consumer is None else consumer_spec(consumer, x, weight)
        outputs, reason = RMS_NORM_FOR_CONSUMERS.try_fused(x, weight, spec, *(consumers or ConsumerSpec()))
        if reason is None:
            *tensors, x = outputs
            return tensors[0] if consumers is None else ConsumerOutputs(tensors, consumers, norm, x), x
    return norm(x), x
