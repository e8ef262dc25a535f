"""The causal depthwise convolution of a short filter with the activation after it."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from .arguments import Unsupported, check_choice, why_other_dtype
from .operator import BackwardArguments, Operator, Results
from .triton.call import Call
from .triton.conv_kernels import launch_conv_backward, launch_conv_forward

WIDTHS = (2, 3, 4)
"""The numbers of taps that kernels have."""


class CausalConv1d(Operator):
    """``causal_conv1d`` as an operator."""

    name = "causal_conv1d"
    tensors = "Tensor x, Tensor weight, Tensor? bias"
    options = "str? activation"
    outputs = ("y",)
    other_shapes = ("weight", "bias")
    takes_dtensors = False
    saved = tensors
    saved_scalars = options
    gradients = ("dx", "dweight", "dbias")
    recomputed_by_itself = True

    def check_options(self, *arguments: Any) -> Unsupported | None:
        x, weight, bias, activation = arguments
        differs = why_other_dtype("weight", "x", weight, x) or why_other_dtype(
            "bias", "x", x if bias is None else bias, x
        )
        if x.dim() != 3:
            reason = f"x must have 3 dimensions, batch, length and channels, not shape {tuple(x.shape)}"
        elif weight.dim() != 2 or weight.shape[0] != x.shape[2] or not weight.shape[1]:
            reason = f"weight must have shape ({x.shape[2]}, taps), not {tuple(weight.shape)}"
        elif bias is not None and bias.shape != weight.shape[:1]:
            reason = f"bias must have shape ({x.shape[2]},), not {tuple(bias.shape)}"
        elif differs is not None:
            reason = f"{differs}; cast it first"  # PyTorch's convolution refuses it too
        else:
            return None if activation is None else check_choice("activation", activation, ("silu",))
        return Unsupported(reason, ValueError)

    def why_reference_only(self, *arguments: Any) -> Unsupported | None:
        weight = arguments[1]
        if weight.shape[1] in WIDTHS:
            return None
        return Unsupported(f"a convolution of {weight.shape[1]} taps, kernels have {', '.join(map(str, WIDTHS))}")

    def forward(self, call: Call, *arguments: Any, training: bool) -> Results:
        x, weight, bias, activation = arguments
        y = call.empty_rows_like(x)
        call.then(launch_conv_forward, x, weight, bias, y, activation)
        return (y,)

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy,), (x, weight, bias), (need_dx, need_dweight, need_dbias) = given.incoming, given.saved, given.needed
        dx = call.empty_rows_like(x) if need_dx else None
        sums = call.empty_weight_like(weight, need_dweight), call.empty_weight_like(bias, need_dbias)
        call.then(launch_conv_backward, x, weight, bias, dy, (dx, *sums), given.saved_scalars[0])
        return dx, *sums


CAUSAL_CONV1D = CausalConv1d()


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Literal["silu"] | None = None
) -> Tensor:
    """A causal depthwise convolution along a sequence, and SiLU of it, its own result never written.

    ``y[t] = act(bias + sum over j of weight[:, taps - 1 - j] * x[t - j])``, with zeros before the first row. Computed
    in fp32, and rounded to x's dtype before the activation. The backward keeps x, weight and bias alone.

    Args:
        x: [batch, length, channels], float32, bfloat16 or float16; float64 is computed by the PyTorch reference. Rows
            of channels are read where they are, at any strides; [batch, channels, length] is passed as
            ``x.transpose(1, 2)``, which is free, and copied if channels do not follow each other in memory.
        weight: [channels, taps], of x's dtype; an ``nn.Conv1d`` has it as ``weight.squeeze(1)``. Kernels have 2 to 4
            taps, the PyTorch reference any number.
        bias: [channels], of x's dtype.
        activation: ``silu``, or None for the convolution alone.

    Returns:
        y, of x's shape and dtype, in x's memory order.

    Raises:
        TypeError: for anything but a dense tensor of floating point.
        ValueError: for other shapes, dtypes or devices, and another activation.
    """
    return CAUSAL_CONV1D.checked(x, weight, bias, activation)
