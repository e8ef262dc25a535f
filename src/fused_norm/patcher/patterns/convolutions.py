"""Causal convolutions with the SiLU after them: recognised, found in a forward, and computed by one kernel.

A function's, and a module's with what is done to its result,

    hidden = causal_conv1d_fn(hidden, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation=self.activation)
    hidden = F.silu(self.conv1d(hidden)[:, :, :length])
    hidden = self.act(self.conv1d(hidden.transpose(1, 2))[..., :length].transpose(1, 2))

become, whatever the names are, with the cut and the transposition where they were,

    hidden = self.fused_norm_conv(causal_conv1d_fn, hidden, self.conv1d.weight.squeeze(1), ...)
    hidden = self.fused_norm_conv_module(F.silu, self.conv1d, hidden, length)[:, :, :length]

A function is recognised by what it computes, a module by its settings. transformers' function is a kernel of another
package if that is installed, and PyTorch's convolution otherwise. Older releases call an ``nn.Conv1d``.
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.autocast import autocast_dtype
from ...kernels.causal_conv1d import CAUSAL_CONV1D
from ..activation_recognition import recognise_activation
from ..block import Block
from ..dataflow import Conditions, Dataflow, flow_of, may_hold
from ..fused_block import Rewrite, runtime
from ..fused_norm_module import warn_once
from ..hooks import are_plain_calls, is_function_as_module, is_genuine, runs_as_compared, short_name, stock_class
from ..native_code import native_code
from ..patch_report import Site
from ..probe import DTYPES, Case, Recognizer, UnrecognisedError, found_once, plain_pytorch
from ..running_code import Identity, RunningCode
from ..source import global_of, names_in
from .calls import Callee, EditedForward, Match, Patterns, call_of_own, callee_name
from .gates import activation_of

SILU = ("silu", "swish")
"""The names that transformers has for SiLU."""

_IGNORED = (
    "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids", "position_embeddings",
    "attention_mask", "is_causal", "cache", "cache_position", "past_key_values", "use_cache", "output_attentions",
    "output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch", "logits_to_keep", "labels",
    "token_type_ids", "mm_token_type_ids",
)  # fmt: skip
"""Arguments that layers hand on to whatever convolves, and that PyTorch's convolution may ignore."""

_PAIRS = (*((dtype, dtype) for dtype in DTYPES), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16))
_BATCH, _CHANNELS, _LENGTH = 2, 3, 7


@dataclass(frozen=True)
class ConvolutionFunction:
    """A function that computes a causal convolution, and SiLU of it if it is given that name.

    Attributes:
        function: the function, or the module that Hugging Face's ``kernels`` makes of it if it is installed.
        running: the code of the function, or of the module's forward, that was compared.
        ignored: the arguments that it ignores; newer releases of transformers raise for packed sequences.
    """

    function: Any
    running: RunningCode
    ignored: frozenset[str]

    def convolve(
        self, x: Any = None, weight: Any = None, bias: Any = None, activation: Any = None, **extra: Any
    ) -> tuple[Any, str | None]:
        """What it makes of these arguments, and None; or None, and why stock code has to run."""
        heeded = [
            name
            for name, value in extra.items()
            if name not in self.ignored and (value is not None or name not in _IGNORED)
        ]
        if activation is not None and activation not in SILU:
            return None, f"the activation of its convolution is {activation}"
        if heeded or not isinstance(x, Tensor) or not isinstance(weight, Tensor) or x.dim() != 3:
            return None, f"its convolution is given other arguments: {', '.join(heeded)}"
        y, reason = _convolve(x.to(weight.dtype), weight, bias, activation)
        return (None, reason) if reason is not None else (y.to(x.dtype), None)


def recognise_convolution(function: Any) -> ConvolutionFunction:
    """Return what is known of a function that computes a causal convolution by PyTorch's operators.

    Raises:
        UnrecognisedError: if it computes something else, or runs a kernel.
    """
    if not isinstance(function, FunctionType) and not is_function_as_module(function):
        raise UnrecognisedError(f"its convolution is a {type(function).__name__}, not a function")
    if (kernel := native_code(function)) is not None:
        raise UnrecognisedError(f"{short_name(function)} runs {kernel}, a kernel already")
    reason = f"{short_name(function)} computes no causal convolution"
    key = recognise_convolution, Identity(function)
    ignored = found_once(lambda: _ignored_by_convolution(function), *key, reason=reason)
    forward = function if isinstance(function, FunctionType) else type(function).forward
    return ConvolutionFunction(function, RunningCode(forward), ignored)


def convolve_as_module(conv: Any, x: Any, length: Any, activation: str | None) -> tuple[Any, str | None]:
    """``act(conv(x)[..., :length])``, and None; or None, and why stock code has to run."""
    if is_causal_convolution(conv) and are_plain_calls(conv) and is_genuine(nn.Conv1d):
        if isinstance(x, Tensor) and x.dim() == 3 and length == x.shape[2]:
            return _convolve(x, conv.weight.squeeze(1), conv.bias, activation)
        return None, "its convolution is cut to another length than it was given"
    return None, "its convolution is another one by now, or other code sees its call"


def is_causal_convolution(module: Any) -> bool:
    """Return whether a module is an ``nn.Conv1d`` that convolves each channel alone, padded by all taps but one."""
    if type(module) is not nn.Conv1d or module.padding_mode != "zeros":
        return False
    is_depthwise = module.groups == module.in_channels == module.out_channels
    is_dense = (*module.stride, *module.dilation) == (1, 1)
    return is_depthwise and is_dense and module.padding == (module.kernel_size[0] - 1,)


def _convolve(x: Tensor, weight: Tensor, bias: Any, activation: str | None) -> tuple[Any, str | None]:
    """The convolution of x [batch, channels, length], in the dtype that autocast has PyTorch's compute in."""
    dtype = autocast_dtype(x)
    if dtype is not None and torch.float64 not in (x.dtype, weight.dtype):
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    rows = x.transpose(1, 2)
    y, reason = CAUSAL_CONV1D.try_fused(rows, weight, bias, None if activation is None else "silu")
    return (None, reason) if reason is not None else (y.transpose(1, 2), None)


@plain_pytorch()
def _ignored_by_convolution(function: Any) -> frozenset[str]:
    """Compare a function with the convolution on small tensors, and return the arguments that it ignores."""
    call = partial(type(function).forward, function) if isinstance(function, nn.Module) else function
    logger = logging.getLogger("transformers")  # its slow convolution warns of itself, and is what a kernel replaces
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        for activation in (*SILU, None):
            cases, simple = partial(_cases, call, activation), (torch.float32,) * 2
            of_bits = (case for dtypes in _PAIRS for case in cases(dtypes))
            in_bf16 = cases(simple, autocast=torch.bfloat16)
            if not (
                Recognizer[Any](of_bits, _formula).agrees((activation, None))
                and Recognizer[Any](in_bf16, _formula).agrees((activation, torch.bfloat16))
                and Recognizer[Any](cases(simple), _formula, gradients=True).agrees((activation, None))
            ):
                raise UnrecognisedError
        return frozenset(
            name
            for name in _IGNORED
            if Recognizer[Any](_cases(call, "silu", simple, handed_on=(name,)), _formula).agrees(("silu", None))
        )
    finally:
        logger.setLevel(level)


def _cases(
    function: Callable[..., Any],
    activation: str | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    autocast: torch.dtype | None = None,
    handed_on: Sequence[str] = (),
) -> Iterator[Case]:
    """Calls with x in either memory order, with a bias and without; of what layers hand on, all but these is None."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = dtypes[1]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)

    def called(named: Mapping[str, Any], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            return function(x, weight, bias, **named)

    sequences = dict.fromkeys(handed_on, torch.tensor([[0, 0, 1, 1, 1, 2, 2]]))
    extra = {**dict.fromkeys(_IGNORED), **sequences}
    ways: list[Mapping[str, Any]] = [{"activation": activation, **extra}]
    if not handed_on:
        ways.append({"activation": activation})
    if activation is None:
        ways.append({})
    for taps in (2, 4):
        x, weight, bias = (
            random(_BATCH, _LENGTH, _CHANNELS, dtype=dtypes[0]),
            random(_CHANNELS, taps),
            random(_CHANNELS),
        )
        for turned in (x.transpose(1, 2), x.transpose(1, 2).contiguous()):
            for named in ways:
                for tensors in ([turned, weight, bias], [turned, weight]):
                    yield Case(partial(called, named), tensors)


def _formula(
    how: tuple[str | None, torch.dtype | None], x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """The convolution in the weight's dtype, or in that of autocast, as one of x's."""
    activation, dtype = how
    cast = x.to(weight.dtype)
    if dtype is not None:
        cast, weight, bias = cast.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    y = CAUSAL_CONV1D.reference(cast.transpose(1, 2), weight, bias, activation)
    return y.transpose(1, 2).to(x.dtype)


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

    pattern, kind, is_named = "convolutions", "conv", True

    call: ast.Call
    callee: Callee
    length: ast.expr | None
    act: Callee | None
    act_call: ast.Call | None
    conditions: Conditions

    @classmethod
    def find(cls, layer: Any, found: Patterns) -> list[Convolution]:
        """The calls of functions with such a name, and of modules whose result is cut to a length at once."""
        flow = flow_of(layer)
        calls = (_convolution(node, flow) for node in ast.walk(flow.definition) if isinstance(node, ast.Call))
        return [convolution for convolution in calls if convolution is not None]

    @classmethod
    def may_be_in(cls, module: nn.Module) -> bool:
        """Return whether a module holds a causal convolution, or its forward uses the name of a function for one."""
        holds_one = any(map(is_causal_convolution, module._modules.values()))
        return holds_one or any(map(CONVOLUTION_NAME.search, names_in(stock_class(module))))

    def functions(self, layer: Any, parts: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """See ``Match``."""
        if self.callee.is_function:
            try:
                yield "fused_norm_convolutions", recognise_convolution(global_of(layer, self.callee.name))
            except UnrecognisedError:
                yield "fused_norm_convolutions", None

    def decide(self, block: Block, index: int, found: Patterns) -> Iterator[Site]:
        """The row of the convolution, unless the module's settings never run it."""
        if not may_hold(self.conditions, block.module):
            return
        callee, act = self.callee.resolve(block), self.act and self.act.resolve(block)
        if not self.callee.is_function and not is_causal_convolution(callee):
            return
        watched = [act] if self.callee.is_function else [callee, act]
        row = block.own_row("conv")
        if any(isinstance(part, nn.Module) and not are_plain_calls(part) for part in watched):
            row = row.skipped("hooks or other code stand on its convolution or the activation of it", "overridden")
        activation = None
        try:
            if self.callee.is_function:
                recognise_convolution(callee)
            if self.act is not None:
                activation = recognise_activation(act)
                if activation.formula != "silu":
                    raise UnrecognisedError(f"the activation of its convolution is {activation.formula}")
        except UnrecognisedError as error:
            yield row.skipped(str(error))
            return
        if row.reason is None:
            block.rewrites.append(Rewrite("convolutions", index, activation=activation, what="conv"))
        yield row

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


@runtime
def fused_norm_conv(self: Any, convolve: Any, *args: Any, **named: Any) -> Any:
    """``convolve(*given, **named)``, a causal convolution."""
    for convolution in self.fused_norm_convolutions:
        if runs_as_compared(convolve, convolution.function, convolution.running):
            y, reason = convolution.convolve(*args, **named)
            if reason is None:
                return y
            warn_once(self.fused_norm_origin, reason)
    return convolve(*args, **named)


@runtime
def fused_norm_conv_module(self: Any, act: Any, conv: Any, x: Any, length: Any) -> Any:
    """``act(conv(x)[..., :length])``, where ``conv`` is an ``nn.Conv1d`` and ``act`` is SiLU, or None."""
    y, reason = convolve_as_module(conv, x, length, None if act is None else "silu")
    if reason is None:
        return y
    warn_once(self.fused_norm_origin, reason)
    y = conv(x)[..., :length]
    return y if act is None else act(y)
