"""The operators of a mixture of experts around its products: rows to experts, biases, the gate, rows back to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import reference
from .arguments import Unsupported, check_choice, check_flag
from .operator import BackwardArguments, Operator, Results
from .reference import CLAMP_HAS_GRADIENT_AT_LIMIT, ActivationName
from .triton.call import Call
from .triton.experts_kernels import (
    launch_expert_bias_backward,
    launch_expert_bias_forward,
    launch_expert_gate,
    launch_expert_permute,
    launch_expert_sum,
    launch_expert_unpermute_backward,
)
from .triton.memory import promoted

EXPERT_ACTIVATIONS: tuple[ActivationName, ...] = ("silu", "gelu", "gelu_tanh")
"""The activations of an MLP's gate that experts may have."""

_ROWS = "Tensor position, Tensor? absent"


class ExpertGate(Operator):
    """``expert_gate`` as an operator."""

    name = "expert_gate"
    tensors = "Tensor x, Tensor? absent"
    options = "str activation, bool interleaved, float? limit, float? alpha"
    outputs = ("y",)
    other_rules = ("absent",)
    takes_dtensors = False
    saved = tensors
    saved_scalars = options
    gradients = ("dx",)
    recomputed_by_itself = True

    def check_options(self, *arguments: Any) -> Unsupported | None:
        x, absent, activation, interleaved, limit, alpha = arguments
        if x.shape[-1] % 2:
            reason = f"x must have an even last dimension, gates and what they multiply, not shape {tuple(x.shape)}"
            return Unsupported(reason, ValueError)
        if absent is not None and x.dim() != 2:
            return Unsupported(f"x must have 2 dimensions if absent is given, not shape {tuple(x.shape)}", ValueError)
        for name, value in (("limit", limit), ("alpha", alpha)):
            if value is not None and (not isinstance(value, (int, float)) or not value > 0):
                return Unsupported(f"{name} must be a positive number or None, not {value!r}", ValueError)
        if alpha is not None and activation != "silu":
            return Unsupported(f"alpha is a factor inside silu, and activation is {activation!r}", ValueError)
        return (
            check_choice("activation", activation, EXPERT_ACTIVATIONS)
            or check_flag("interleaved", interleaved)
            or _check_absent(absent, x.shape[0], x.device)
        )

    def forward(self, call: Call, *arguments: Any, training: bool) -> Results:
        x, absent, *gate = arguments
        y = call.empty_rows_like(x, width=x.shape[-1] // 2)
        call.then(launch_expert_gate, x, absent, gate, y)
        return (y,)

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy,), (x, absent) = given.incoming, given.saved
        dx = call.empty_rows_like(x)
        call.then(launch_expert_gate, x, absent, given.saved_scalars, dx, dy, at_limit=CLAMP_HAS_GRADIENT_AT_LIMIT)
        return (dx,)


class ExpertPermute(Operator):
    """``expert_permute`` as an operator."""

    name = "expert_permute"
    tensors = f"Tensor x, {_ROWS}"
    outputs = ("y",)
    other_rules = ("position", "absent")
    takes_dtensors = False
    saved = _ROWS
    gradients = ("dx",)

    def check_options(self, *arguments: Any) -> Unsupported | None:
        x, position, absent = arguments
        if x.dim() != 2:
            return Unsupported(f"x must have shape [tokens, N], not {tuple(x.shape)}", ValueError)
        refusal = _check_index("position", position, torch.int64, (x.shape[0], "K"), x.device)
        return refusal or _check_absent(absent, position.numel(), x.device)

    def forward(self, call: Call, *arguments: Any, training: bool) -> Results:
        x, position, absent = arguments
        y = call.empty(x, (position.shape[0] * position.shape[1], x.shape[1]))
        call.then(launch_expert_permute, x, position, absent, y)
        return (y,)

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy,), (position, absent) = given.incoming, given.saved
        dx = call.empty(dy, (position.shape[0], dy.shape[1]))
        call.then(launch_expert_sum, dy, None, position, absent, dx, dy.dtype)
        return (dx,)

    def reference_backward(self, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy,), (position, absent) = given.incoming, given.saved
        return (reference.present_rows(dy, absent)[position].sum(1),)


class ExpertUnpermute(Operator):
    """``expert_unpermute`` as an operator."""

    name = "expert_unpermute"
    tensors = f"Tensor x, Tensor weights, {_ROWS}"
    options = "ScalarType dtype"
    outputs = ("y",)
    other_rules = ("position", "absent")
    takes_dtensors = False
    saved = tensors
    gradients = ("dx", "dweights")

    def check_options(self, *arguments: Any) -> Unsupported | None:
        x, weights, position, absent, dtype = arguments
        if x.dim() != 2 or weights.dim() != 2 or x.shape[0] != weights.shape[0] * weights.shape[1]:
            return Unsupported(
                "x and weights must have shapes [tokens * K, N] and [tokens, K], not"
                f" {tuple(x.shape)} and {tuple(weights.shape)}",
                ValueError,
            )
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            return Unsupported(f"dtype must be a floating point dtype, not {dtype!r}", TypeError)
        refusal = _check_index("position", position, torch.int64, (weights.shape[0], "K"), weights.device)
        return refusal or _check_absent(absent, x.shape[0], x.device)

    def forward(self, call: Call, *arguments: Any, training: bool) -> Results:
        x, weights, position, absent, dtype = arguments
        y = call.empty(x, (position.shape[0], x.shape[1]), dtype=dtype)
        call.then(launch_expert_sum, x, weights, position, absent, y, promoted(x.dtype, weights.dtype))
        return (y,)

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy,), (x, weights, position, absent), (need_dx, need_dweights) = given.incoming, given.saved, given.needed
        dx = call.empty(x, x.shape) if need_dx else None
        dweights = call.empty(weights, weights.shape) if need_dweights else None
        call.then(launch_expert_unpermute_backward, dy, x, weights, position, absent, dx, dweights)
        return dx, dweights


class ExpertBias(Operator):
    """``expert_bias`` as an operator."""

    name = "expert_bias"
    tensors = "Tensor bias, Tensor expert, Tensor ends"
    outputs = ("y",)
    other_rules = ("expert", "ends")
    takes_dtensors = False
    saved = "Tensor expert, Tensor ends"
    gradients = ("dbias",)

    def check_options(self, *arguments: Any) -> Unsupported | None:
        bias, expert, ends = arguments
        if bias.dim() != 2:
            return Unsupported(f"bias must have shape [experts, N], not {tuple(bias.shape)}", ValueError)
        refusal = _check_index("expert", expert, torch.int64, ("rows",), bias.device)
        return refusal or _check_index("ends", ends, torch.int32, bias.shape[:1], bias.device)

    def forward(self, call: Call, *arguments: Any, training: bool) -> Results:
        bias, expert, ends = arguments
        y = call.empty(bias, (len(expert), bias.shape[1]))
        call.then(launch_expert_bias_forward, bias, expert, ends, y)
        return (y,)

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy,), (_, ends) = given.incoming, given.saved
        dbias = call.empty(dy, (len(ends), dy.shape[1]))
        call.then(launch_expert_bias_backward, dy, ends, dbias)
        return (dbias,)

    def reference_backward(self, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy,), (expert, ends) = given.incoming, given.saved
        # A bias is added: its gradient does not depend on it.
        bias = torch.zeros((len(ends), dy.shape[1]), dtype=dy.dtype, device=dy.device)
        return reference.gradients_of(reference.expert_bias, (bias, expert, ends), (dy,), (True,))


EXPERT_BIAS = ExpertBias()
EXPERT_GATE = ExpertGate()
EXPERT_PERMUTE = ExpertPermute()
EXPERT_UNPERMUTE = ExpertUnpermute()


def _check_absent(absent: Any, rows: int, device: torch.device) -> Unsupported | None:
    """Refuse an ``absent`` that is no bool for each of as many rows, on this device."""
    return None if absent is None else _check_index("absent", absent, torch.bool, (rows,), device)


def _check_index(
    name: str, tensor: Any, dtype: torch.dtype, shape: Sequence[int | str], device: torch.device
) -> Unsupported | None:
    """Refuse what is no tensor of this dtype, device and shape, in which a string stands for any length."""
    if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        return Unsupported(f"{name} must be a tensor of {dtype}, not {kind}", TypeError)
    fits = [isinstance(size, str) or size == actual for size, actual in zip(shape, tensor.shape, strict=False)]
    if tensor.dim() == len(shape) and all(fits) and tensor.device == device:
        return None
    sizes = f"{shape[0]}," if len(shape) == 1 else ", ".join(map(str, shape))
    return Unsupported(
        f"{name} must have shape ({sizes}) on {device}, not {tuple(tensor.shape)} on {tensor.device}", ValueError
    )


def expert_gate(
    x: Tensor,
    absent: Tensor | None = None,
    activation: ActivationName = "silu",
    *,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
) -> Tensor:
    """The gate between the two products of experts: ``y = act(gate) * up``, from one tensor with both.

    With ``limit`` the gate is at most that, and up within it on both sides. With ``alpha`` it is the gate of gpt-oss,
    ``y = (up + 1) * (gate * sigmoid(alpha * gate))``. Each operation but those inside of an activation is rounded
    to x's dtype. The backward keeps x, and returns one gradient of it.

    Args:
        x: [..., 2 I], float32, bfloat16 or float16; float64 is computed by the PyTorch reference.
        absent: [S] of an x of shape [S, 2 I], bool: rows that are not read, the result of which is zero; for experts of
            other devices.
        activation: ``silu``, ``gelu`` (by erf), or ``gelu_tanh``.
        interleaved: gate and up take turns in a row; otherwise they are its halves.
        limit: a positive number, or None.
        alpha: a positive number, or None; only with ``silu``.

    Returns:
        y, [..., I] in x's memory order, of x's dtype.

    Raises:
        TypeError: for anything but dense tensors of these dtypes.
        ValueError: for another activation, rows of an odd length, and shapes or numbers that do not fit.
    """
    limit, alpha = (float(number) if isinstance(number, int) else number for number in (limit, alpha))
    return EXPERT_GATE.checked(x, absent, activation, interleaved, limit, alpha)


def expert_bias(bias: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
    """The bias of each row's expert, for rows in the order of experts: ``y[s] = bias[expert[s]]``.

    Rows after the last of ``ends`` are zero, and their gradients are not read. The backward sums the gradients of an
    expert's rows in fp32, in a fixed order, and rounds once.

    Args:
        bias: [E, N], float32, bfloat16 or float16; float64 is computed by the PyTorch reference.
        expert: [S], int64: numbers below E that do not fall.
        ends: [E], int32: how many rows the experts up to each one have.

    Returns:
        y, [S, N], contiguous, of bias's dtype.

    Raises:
        TypeError: for anything but dense tensors of these dtypes.
        ValueError: for shapes and devices that do not fit.
    """
    return EXPERT_BIAS.checked(bias, expert, ends)


def expert_permute(x: Tensor, position: Tensor, absent: Tensor | None = None) -> Tensor:
    """The rows of tokens in the order of experts: ``y[position[t, k]] = x[t]``.

    The backward sums the gradients of a token's K rows in fp32, in the order of k, and rounds once.

    Args:
        x: [T, N], float32, bfloat16 or float16; float64 is computed by the PyTorch reference.
        position: [T, K], int64: each of the numbers from 0 to T K - 1 once.
        absent: [T K], bool: the rows of y that are zero, whose gradients are not read.

    Returns:
        y, [T K, N], contiguous, of x's dtype.

    Raises:
        TypeError: for anything but dense tensors of these dtypes.
        ValueError: for shapes and devices that do not fit.
    """
    return EXPERT_PERMUTE.checked(x, position, absent)


def expert_unpermute(
    x: Tensor,
    weights: Tensor,
    position: Tensor,
    absent: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The weighted sum of what a token's experts return: ``y[t] = sum over k of x[position[t, k]] * weights[t, k]``.

    Each product is rounded to the dtype that x and weights promote to, and so is the sum, which is taken in fp32, in
    the order of k. Gradients are computed in fp32 and rounded once. The backward keeps all arguments.

    Args:
        x: [T K, N], float32, bfloat16 or float16; float64 is computed by the PyTorch reference.
        weights: [T, K], a dtype of its own.
        position: [T, K], int64: each of the numbers from 0 to T K - 1 once.
        absent: [T K], bool: rows of x that are not read, and count as zero.
        dtype: of the result; x's unless given.

    Returns:
        y, [T, N], contiguous.

    Raises:
        TypeError: for anything but dense tensors of these dtypes.
        ValueError: for shapes and devices that do not fit.
    """
    dtype = x.dtype if dtype is None and isinstance(x, Tensor) else dtype
    return EXPERT_UNPERMUTE.checked(x, weights, position, absent, dtype)
