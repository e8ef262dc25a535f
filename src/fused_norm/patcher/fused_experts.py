"""Experts of transformers whose rows, gate and sums are computed by kernels around its grouped products.

A module of experts asks its config for an implementation. If that is transformers' own ``grouped_mm``, the fused class
sorts rows by experts, calls transformers' grouped linear twice, as the stock function does, and computes with kernels
what is before, between and after. Every other implementation, and every call that other code would see, runs as it is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product, takewhile
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..kernels.autocast import autocast_dtype
from ..kernels.experts import EXPERT_ACTIVATIONS, EXPERT_BIAS, EXPERT_GATE, EXPERT_PERMUTE, EXPERT_UNPERMUTE
from ..kernels.operator import Operator
from ..kernels.reference import ACTIVATIONS
from ..kernels.switch import switch
from .activation_recognition import Activation, ActivationName, recognise_activation
from .class_swap import why_class_overridden
from .fused_norm_module import warn_once
from .hooks import Fused, are_plain_calls, defined_function, name_of_function
from .module_features import FusedModule, ModuleFeature, OverriddenError
from .probe import (
    DTYPES,
    UnrecognisedError,
    cpu_replica,
    found_once,
    key_of_module,
    own_attributes,
    plain_pytorch,
    same_values,
)
from .running_code import RunningCode
from .source import cells_of

_MOE = "transformers.integrations.moe"
_GROUPED_MM = "grouped_mm"
_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
_FLAGS = ("has_gate", "has_bias", "is_transposed")
"""What transformers' decorator sets on each module of experts."""

_STOCK = "transformers' experts"
_OTHER_ARGUMENTS = "it is called with other arguments than three tensors"


@dataclass(frozen=True)
class GateOfExperts:
    """What a class of experts computes between its products, and the code that was compared with the formula.

    Attributes:
        activation: one of ``EXPERT_ACTIVATIONS``.
        interleaved: gate and up take turns in a row; otherwise they are its halves.
        limit: the name of the attribute with the limit of gate and up; None without one.
        alpha: the name of the attribute with the factor inside of the activation; None without one.
        method: ``_apply_gate`` of the class.
        running: its code.
        held: the activations that a module holds, by their names.
        function: that of ``grouped_mm``.
        function_running: its code.
    """

    activation: ActivationName
    interleaved: bool
    limit: str | None
    alpha: str | None
    method: Any
    running: RunningCode
    held: tuple[tuple[str, Activation], ...]
    function: Any
    function_running: RunningCode

    def options_of(self, experts: nn.Module) -> tuple[Any, ...] | None:
        """The options of ``EXPERT_GATE`` for a module; None if a limit or factor of it is no positive float."""
        numbers = [None if name is None else vars(experts).get(name, math.nan) for name in (self.limit, self.alpha)]
        if any(number is not None and (type(number) is not float or not 0 < number < math.inf) for number in numbers):
            return None
        return self.activation, self.interleaved, *numbers

    def __str__(self) -> str:
        parts = [self.activation, "interleaved" if self.interleaved else "", "clamped" if self.limit else ""]
        return ", ".join(filter(None, parts)) + " between grouped products"


class FusedExperts(Fused):
    """Base of the classes put on modules of experts; a subclass also derives from the module's own class."""

    fused_norm_gate: ClassVar[GateOfExperts]

    @property
    def fused_norm_what(self) -> str:
        """``experts (silu between grouped products)``, with their gate."""
        return f"experts ({self.fused_norm_gate})"

    def forward(
        self, hidden_states: Any = None, top_k_index: Any = None, top_k_weights: Any = None, *args: Any, **named: Any
    ) -> Any:
        """Compute the weighted sum of what each token's experts return, by kernels around stock's grouped products.

        Args:
            hidden_states: [T, H].
            top_k_index: [T, K], the experts of each token.
            top_k_weights: [T, K], their weights.
            args: what else the class's own forward takes.
            named: the same, by name.

        Returns:
            [T, H], in the dtype of the hidden states.
        """
        stock, inputs = self.fused_norm_origin.forward, (hidden_states, top_k_index, top_k_weights)
        # Some have other names, or are left out.
        if hidden_states is None or top_k_index is None or top_k_weights is None:
            first = list(takewhile(lambda value: value is not None, inputs))
            rest = zip(_ARGUMENTS[len(first) :], inputs[len(first) :], strict=True)
            return stock(self, *first, *args, **{name: value for name, value in rest if value is not None}, **named)
        if torch.compiler.is_compiling() or switch.depth:
            return stock(self, *inputs, *args, **named)
        reason = why_stock(self)
        if reason is None and (args or named):
            reason = _OTHER_ARGUMENTS
        if reason is None:
            y, reason = _run(self, *inputs)
            if reason is None:
                return y
        warn_once(self.fused_norm_origin, reason, _STOCK)
        return stock(self, *inputs, *args, **named)


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is one of experts that choose among implementations, fused or not."""
    own = vars(module)
    return _MOE in sys.modules and "config" in own and all(isinstance(own.get(name), bool) for name in _FLAGS)


def why_stock(experts: Any) -> str | None:
    """Return the reason why a fused module of experts, as it is now, has to run its class's forward; None if not."""
    kind = type(experts)
    gate: GateOfExperts = kind.fused_norm_gate
    if not are_plain_calls(inside=kind):
        return ""
    if reason := why_other_implementation(experts, kind.fused_norm_origin):
        return reason
    if grouped_mm() is not gate.function or not gate.function_running.is_in(gate.function):
        return f"the function of {_GROUPED_MM} has changed since it was patched"
    method = kind._apply_gate
    if "_apply_gate" in vars(experts) or method is not gate.method or not gate.running.is_in(method):
        return "its gate has changed since it was patched"
    if reason := _why_other_structure(experts):
        return reason
    for name, activation in gate.held:
        act = getattr(experts, name, None)
        if not activation.is_now(act):
            return f"its {name} has changed since it was patched"
        if isinstance(act, nn.Module) and not are_plain_calls(act):
            return f"other code sees the calls of its {name}"
    return None if gate.options_of(experts) else "its limit or its factor is no positive float"


def _why_other_structure(experts: Any) -> str | None:
    """Why a module of experts computes something else than two products with a gate between; None if it does not."""
    if not experts.has_gate:
        return "it has no gate between its products"
    return "a norm follows its products" if getattr(experts, "has_post_expert_norm", False) else None


def why_other_implementation(experts: Any, origin: Any) -> str | None:
    """Return the reason that a module of experts does not run transformers' own ``grouped_mm`` now; None if it does."""
    code, module = getattr(origin.forward, "__code__", None), sys.modules[_MOE]
    place = None if code is None else (code.co_filename, code.co_qualname.partition(".")[0])
    if place != (module.__file__, "use_experts_implementation"):
        return "its forward does not ask transformers for an implementation of experts"
    cells = {name: cell.cell_contents for name, cell in cells_of(origin.forward).items()}
    chosen = getattr(experts.config, "_experts_implementation", None)
    if chosen != _GROUPED_MM:
        return f"its config asks for experts by {chosen}, not by {_GROUPED_MM}"
    function = cells["experts_interface"].get_interface(chosen, cells["original_forward"])
    if function is not grouped_mm():
        return f"the function of {_GROUPED_MM} was replaced, by {name_of_function(function)}"
    return None


def grouped_mm() -> Any:
    """Transformers' own function for ``grouped_mm``; None if there is none, or other code has replaced it."""
    return defined_function(_MOE, "grouped_mm_experts_forward")


def _run(experts: Any, hidden: Any, index: Any, weights: Any) -> tuple[Any, str | None]:
    """The output of experts by kernels, and None; or None, and why the stock function has to run."""
    if any(type(tensor) is not Tensor for tensor in (hidden, index, weights)):
        return None, _OTHER_ARGUMENTS
    if not (hidden.dim() == index.dim() == 2 and hidden.shape[0] == index.shape[0] and index.shape == weights.shape):
        return None, _OTHER_ARGUMENTS
    reason: str | None = None

    def fused(operator: Operator, otherwise: Callable[..., Tensor] | None, *arguments: Any) -> Tensor:
        nonlocal reason
        y, why_not = operator.try_fused(*arguments)
        if why_not is None:
            return y
        reason = why_not
        if otherwise is None:
            raise _NotTakenError
        return otherwise(*arguments)

    def gated(gate_up: Tensor, absent: Tensor | None, *options: Any) -> Tensor:
        return experts._apply_gate(gate_up if absent is None else gate_up.masked_fill(absent.unsqueeze(-1), 0.0))

    def unpermute(x: Tensor, weights: Tensor, *rest: Any) -> Tensor:
        if autocast_dtype(x) is not None and hidden.dtype != torch.promote_types(x.dtype, weights.dtype):
            return EXPERT_UNPERMUTE.reference(x, weights, *rest)  # autocast may sum in float32
        return fused(EXPERT_UNPERMUTE, EXPERT_UNPERMUTE.reference, x, weights, *rest)

    gate: GateOfExperts = experts.fused_norm_gate
    permute, bias = partial(fused, EXPERT_PERMUTE, None), partial(fused, EXPERT_BIAS, EXPERT_BIAS.reference)
    steps = permute, bias, partial(fused, EXPERT_GATE, gated), unpermute
    try:
        y = outputs(experts, gate.function, steps, gate.options_of(experts) or (), hidden, index, weights)
    except _NotTakenError:
        return None, reason
    warn_once(experts.fused_norm_origin, reason, "a part of transformers' experts")
    return y, None


class _NotTakenError(Exception):
    """Kernels do not take a call."""


Steps = tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]]
"""The functions by which experts are computed around their products; they take what the operators do."""


def outputs(
    experts: Any, function: Any, steps: Steps, options: tuple[Any, ...], hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """The weighted sums of what experts return, [T, H].

    Args:
        experts: the module, or a replica of it.
        function: transformers' function for ``grouped_mm``, in whose namespace its grouped linear is looked up.
        steps: computes what is before the products, their biases, what is between them, and what is after them.
        options: of the gate.
        hidden: [T, H].
        index: [T, K], the experts of each row; those of other devices have numbers from ``num_experts`` on.
        weights: [T, K].
    """
    permute, add_bias, gate, unpermute = steps
    linear = partial(function.__globals__["_grouped_linear"], is_transposed=experts.is_transposed)
    count = experts.num_experts
    sorted_ids, order = torch.sort(index.reshape(-1))
    numbers = torch.arange(order.numel(), device=order.device)
    position = torch.empty_like(order).scatter_(0, order, numbers).view(index.shape)
    ends = torch.searchsorted(sorted_ids, torch.arange(count, device=order.device), right=True, out_int32=True)
    absent = None
    if getattr(experts, "_is_expert_parallel", True):
        absent = sorted_ids >= count
        sorted_ids.clamp_(max=count - 1)

    def multiply(x: Tensor, name: str) -> Tensor:
        bias = add_bias(getattr(experts, f"{name}_bias"), sorted_ids, ends) if experts.has_bias else None
        y: Tensor = linear(x, getattr(experts, name), ends, bias=bias)
        return y

    gate_up = multiply(permute(hidden, position, absent), "gate_up_proj")
    y = multiply(gate(gate_up, absent, *options), "down_proj")
    return unpermute(y, weights, position, absent, hidden.dtype)


def recognise_experts(experts: Any, origin: Any) -> GateOfExperts:
    """Return what a module of experts computes between its products, if all of it has the bits of the formula.

    Transformers' own ``grouped_mm`` runs in it now: ``why_other_implementation`` returns None.

    Raises:
        UnrecognisedError: if it computes something else, or if it cannot be run to find out.
    """
    if reason := _why_other_structure(experts):
        raise UnrecognisedError(reason)
    own = own_attributes(experts)
    functions = {name: value for name, value in own.items() if isinstance(value, (FunctionType, BuiltinFunctionType))}
    members = {**experts._modules, **functions}
    activations = tuple((name, recognise_activation(member)) for name, member in members.items())
    for name, act in members.items():
        if isinstance(act, nn.Module) and not are_plain_calls(act):
            raise UnrecognisedError(f"other code sees the calls of its {name}")
    if "_apply_gate" in vars(experts):
        raise UnrecognisedError("its gate was replaced on the instance")
    method, function = origin._apply_gate, grouped_mm()
    plain = {name: value for name, value in own.items() if name != "config"}
    key = recognise_experts, key_of_module(origin, plain), *[activation.formula for _, activation in activations]
    gate = found_once(lambda: _compared(origin, function, plain, experts), *key)
    return GateOfExperts(*gate, method, RunningCode(method), activations, function, RunningCode(function))


def _fused(experts: Any, origin: Any) -> FusedModule:
    if reason := why_other_implementation(experts, origin):
        raise OverriddenError(reason)
    gate = recognise_experts(experts, origin)
    return FusedModule(FusedExperts, {"fused_norm_gate": gate}, str(gate))


EXPERTS = ModuleFeature("experts", is_experts, why_class_overridden, _fused)


_TOKENS, _EXPERTS, _TOP_K, _WIDTH, _INNER = 12, 3, 2, 16, 8


@plain_pytorch()  # which leaves a default device, such as meta, too
def _compared(
    origin: Any, function: Any, plain: Mapping[str, Any], experts: nn.Module
) -> tuple[ActivationName, bool, str | None, str | None]:
    """Find the gate of replicas of a module, and compare all that they compute with the formula, bit for bit."""
    floats = [name for name, value in plain.items() if type(value) is float]
    numbers = {name: 0.75 + 0.5 * place for place, name in enumerate(floats)}
    attributes = {**plain, **numbers, "num_experts": _EXPERTS, "config": SimpleNamespace()}
    attributes["config"]._experts_implementation = _GROUPED_MM
    replica: Any = cpu_replica(origin, attributes)
    replica._modules.update(experts._modules)
    matches = [
        candidate
        for candidate in product(EXPERT_ACTIVATIONS, (False, True), (None, *floats), (None, *floats))
        if _is_gate(replica, *candidate)
    ]
    if len(matches) != 1:
        raise UnrecognisedError("what it computes between its products is no gate that is known here")
    (gate,) = matches
    if not _agrees(replica, function, gate):
        raise UnrecognisedError("its grouped_mm does not compute the formula bit for bit")
    return gate


def _options(replica: Any, activation: ActivationName, interleaved: bool, *names: str | None) -> tuple[Any, ...]:
    return activation, interleaved, *(None if name is None else getattr(replica, name) for name in names)


def _gate_formula(x: Tensor, absent: Tensor | None, activation: ActivationName, *options: Any) -> Tensor:
    return EXPERT_GATE.reference(x, absent, activation, *options, act=ACTIVATIONS[activation])


def _is_gate(replica: Any, activation: ActivationName, interleaved: bool, *names: str | None) -> bool:
    """Return whether a replica's gate has the bits of the formula, for values of every size."""
    if names[1] is not None and activation != "silu":
        return False
    options = _options(replica, activation, interleaved, *names)
    scales = torch.tensor([1e-3, 1.0, 4.0, 1e3])
    values = torch.randn(64, 2 * _INNER, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    values = (values[:, None] * scales[:, None]).view(-1, 2 * _INNER)
    values[0, ::3] = torch.nan
    for dtype in DTYPES:
        x = values.to(dtype)
        try:
            actual = replica._apply_gate(x.clone())
        except Exception:  # foreign code may raise anything
            return False
        if not isinstance(actual, Tensor) or not same_values(actual, _gate_formula(x, None, *options)):
            return False
    return True


def _agrees(replica: Any, function: Any, gate: tuple[ActivationName, bool, str | None, str | None]) -> bool:
    """Return whether a replica's outputs and all gradients have the bits of the formula, with absent experts too."""
    steps = EXPERT_PERMUTE.reference, EXPERT_BIAS.reference, _gate_formula, EXPERT_UNPERMUTE.reference
    formula = partial(outputs, replica, function, steps, _options(replica, *gate))
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, scale: float, dtype: torch.dtype) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype).requires_grad_()

    parallel = (False, True) if hasattr(replica, "_is_expert_parallel") else (None,)
    for dtype, is_parallel in product((torch.float32, torch.bfloat16), parallel):
        if is_parallel is not None:
            replica._is_expert_parallel = is_parallel
        with torch.enable_grad():
            shapes = {"gate_up_proj": (2 * _INNER, _WIDTH), "down_proj": (_WIDTH, _INNER)}
            parameters = {}
            for name, (rows, columns) in shapes.items():
                size = (columns, rows) if replica.is_transposed else (rows, columns)
                parameters[name] = nn.Parameter(drawn(_EXPERTS, *size, scale=1.0, dtype=dtype).detach())
                if replica.has_bias:
                    parameters[f"{name}_bias"] = nn.Parameter(drawn(_EXPERTS, rows, scale=1.0, dtype=dtype).detach())
            replica._parameters.update(parameters)
            hidden = drawn(_TOKENS, _WIDTH, scale=1.0, dtype=dtype)
            weights = drawn(_TOKENS, _TOP_K, scale=1.0, dtype=torch.float32)
            absent = _EXPERTS + (is_parallel is not False)
            index = torch.randint(0, absent, (_TOKENS, _TOP_K), generator=generator)
            leaves = hidden, weights, *parameters.values()
            try:
                results = [call(hidden, index, weights) for call in (partial(type(replica).forward, replica), formula)]
            except Exception:  # foreign code may raise anything
                return False
            if not isinstance(results[0], Tensor) or not same_values(*results):
                return False
            dy = drawn(*results[1].shape, scale=1.0, dtype=results[1].dtype).detach()
            gradients = [torch.autograd.grad(y, leaves, dy, materialize_grads=True) for y in results]
            if not all(map(same_values, *gradients)):
                return False
    return True
