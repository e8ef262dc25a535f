"""The causal convolutions of a forward: found in its source, and replaced by calls that may be fused.

A function's, and a module's with what is done to its result,

    hidden = causal_conv1d_fn(hidden, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation=self.activation)
    hidden = F.silu(self.conv1d(hidden)[:, :, :length])
    hidden = self.act(self.conv1d(hidden.transpose(1, 2))[..., :length].transpose(1, 2))

become, whatever the names are, with the cut and the transposition where they were,

    hidden = self.fused_norm_conv(causal_conv1d_fn, hidden, self.conv1d.weight.squeeze(1), ...)
    hidden = self.fused_norm_conv_module(F.silu, self.conv1d, hidden, length)[:, :, :length]
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..activation_recognition import Activation, recognise_activation
from ..block import Block
from ..convolution_recognition import is_causal_convolution, recognise_convolution
from ..dataflow import Conditions, Dataflow, may_hold
from ..fused_block import Rewrite
from ..hooks import are_plain_calls
from ..patch_report import Site
from ..probe import UnrecognisedError
from ..source import global_of
from .calls import Callee, EditedForward, Match, call_of_own, callee_name
from .gates import activation_of

CONVOLUTION_NAME = re.compile(r"causal_conv(?!.*(update|step))")
"""Part of the names of functions that convolve a sequence; others update the state of one that is generated."""


@dataclass(repr=False)
class Convolution(Match):
    """One call of a causal convolution.

    Attributes:
        call: the call.
        callee: the global function, or the attribute that may be an ``nn.Conv1d``.
        length: what a module's result is cut to, None for a function.
        act: what is called for the result alone, if anything is.
        act_call: that call.
        conditions: those under which it is made, as far as settings of the module decide it.
    """

    call: ast.Call
    callee: Callee
    length: ast.expr | None
    act: Callee | None
    act_call: ast.Call | None
    conditions: Conditions

    def bypassed(self, parts: Sequence[str]) -> list[str]:
        """See ``Match``."""
        return [] if self.act is None else [self.act.name]

    def edit(self, rewrite: Rewrite, forward: EditedForward) -> None:
        """Put the fused call in the convolution's place."""
        method = "fused_norm_conv" if self.length is None else "fused_norm_conv_module"
        leading: list[ast.expr] = [self.call.func]
        if self.length is not None:
            leading.insert(0, ast.Constant(None) if self.act_call is None else self.act_call.func)
            self.call.args.append(self.length)
        self.call.args[:0] = leading
        self.call.func = forward.code(f"self.{method}")
        if self.act_call is not None:
            forward.replace(self.act_call, self.act_call.args[0])

    def is_site(self, block: Block) -> bool:
        """Return whether it is made in this module, and by a causal convolution if by a module."""
        if not may_hold(self.conditions, block.module):
            return False
        return self.callee.is_function or is_causal_convolution(self.callee.resolve(block))

    def recognised(self, block: Block, function: Any) -> Activation | None:
        """What is known of its activation, of a module's; ``function``: what it is written in, a class for its forward.

        Raises:
            UnrecognisedError: if it is not what is fused.
        """
        if self.callee.is_function:
            recognise_convolution(global_of(function, self.callee.name))
        if self.act is None:
            return None
        activation = recognise_activation(self.act.resolve(block, function))
        if activation.formula != "silu":
            raise UnrecognisedError(f"the activation of its convolution is {activation.formula}")
        return activation


def decide_convolutions(convolutions: Sequence[Convolution], block: Block) -> Iterator[Site]:
    """The rows of convolutions, but for those that the module's settings never run."""
    for index, convolution in enumerate(convolutions):
        if not convolution.is_site(block):
            continue
        row = block.own_row("conv", block.applied_parts("convolutions", index) is not None)
        watched = [] if convolution.callee.is_function else [convolution.callee.resolve(block)]
        watched += [] if convolution.act is None else [convolution.act.resolve(block)]
        if any(isinstance(part, nn.Module) and not are_plain_calls(part) for part in watched):
            row = row.skipped("hooks or other code stand on its convolution or the activation of it", "overridden")
        try:
            activation = convolution.recognised(block, block.origin)
        except UnrecognisedError as error:
            yield row.skipped(str(error))
            continue
        if row.reason is None:
            block.rewrites.append(Rewrite("convolutions", index, activation=activation))
        yield row


def decide_missed_convolutions(
    convolutions: Sequence[Convolution], block: Block, function: Any, reason: str
) -> Iterator[Site]:
    """The row of convolutions that cannot be fused, for a ``reason``, in a ``function`` that the forward calls."""
    for convolution in convolutions:
        with suppress(UnrecognisedError):
            if convolution.is_site(block):
                convolution.recognised(block, function)
                yield block.own_row("conv", already=False).skipped(f"its convolution {reason}", in_helper=True)
                return


def find_convolutions(flow: Dataflow) -> list[Convolution]:
    """The calls of functions with such a name, and of modules whose result is cut to a length at once."""
    calls = (_convolution(node, flow) for node in ast.walk(flow.definition) if isinstance(node, ast.Call))
    return [convolution for convolution in calls if convolution is not None]


def _convolution(call: ast.Call, flow: Dataflow) -> Convolution | None:
    conditions = flow.conditions(call)
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if CONVOLUTION_NAME.search(name) and len(call.args) + len(call.keywords) > 1 and not flow.is_local(name):
        return Convolution(call, Callee(name, True), None, None, None, conditions)
    if call_of_own(call, flow.own) is None:
        return None
    node: ast.expr = call
    length, is_turned = None, False
    while True:
        parent: Any = flow.parents[node]
        if isinstance(parent, ast.Subscript) and parent.value is node and length is None:
            length = _length_of(parent.slice, is_turned)
            if length is None:
                return None
            node = parent
        elif isinstance(parent, ast.Attribute) and parent.attr == "transpose":
            node = flow.parents[parent]  # type: ignore[assignment]
            if not isinstance(node, ast.Call) or ast.unparse(node).rpartition(".")[2] != "transpose(1, 2)":
                return None
            is_turned = not is_turned
        else:
            break
    if length is None:
        return None
    act = activation_of(parent, flow) if isinstance(parent, ast.Call) and parent.args == [node] else None
    return Convolution(call, Callee(callee_name(call)), length, act, None if act is None else parent, conditions)


def _length_of(cut: ast.expr, is_turned: bool) -> ast.expr | None:
    """``length`` of ``[..., :length]``, or of ``[:, :length]`` if the dimensions are turned; None of another cut."""
    parts = cut.elts if isinstance(cut, ast.Tuple) else [cut]
    ends = [part for part in parts if isinstance(part, ast.Slice) and part.upper is not None]
    if len(ends) != 1 or ends[0].lower is not None or ends[0].step is not None:
        return None
    shape = ["end" if part is ends[0] else ast.unparse(part) for part in parts]
    whole_slices = ([":", "end"], [":", "end", ":"]) if is_turned else (["...", "end"], [":", ":", "end"])
    length = ends[0].upper
    of = length.value if isinstance(length, ast.Subscript) else length  # x.shape[-1], which is looked up earlier then
    return length if shape in whole_slices and isinstance(of, (ast.Name, ast.Attribute)) else None
