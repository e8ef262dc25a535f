"""RMSNorm, with or without the residual add in front of it, that gives its result in FP8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...spec import Casting, NormSpec
from .. import reference
from ..add_rms_norm import ADD_RMS_NORM
from ..arguments import KERNEL_DTYPES, check_norm, check_residual, check_scale
from ..operator import Backward, BackwardCall, Facts, Operator, Tensors, norm_spec
from ..plans import WIDEST_FORWARD
from ..rms_norm import RMS_NORM
from .backward_kernels import launch_backward_from_codes
from .cast import INPUT_GROUP, cast, check_groups, numbers_of
from .codes import CODES_OF_KERNELS, runs_fp8_kernels_on
from .forward_kernels import empty_fp8_norm, launch_fp8_norm
from .quantized import Quantized, carrier_of, on_carrier
from .recipe import RECIPE_OPTIONS, FP8Recipe, recipe_from, recipe_of


class _NormToFP8(Operator):
    """Base of the operators whose norm is written in FP8.

    Their last options are the recipe, as ``FP8Recipe.options`` has it, and whether codes are wanted transposed as well.
    """

    options = f"{RECIPE_OPTIONS}, bool transposed"
    not_differentiable = ("q", "scale", "transposed", "rstd")

    def takes(self, *arguments: Any) -> bool:
        recipe, _ = _recipe_in(arguments)
        return arguments[0].shape[-1] <= WIDEST_FORWARD and runs_fp8_kernels_on(recipe, *arguments[: self.tensor_count])


def _recipe_in(arguments: Sequence[Any]) -> tuple[FP8Recipe, bool]:
    """``recipe`` and ``transposed``, from the end of such an operator's arguments."""
    return recipe_from(arguments[-10:-1]), arguments[-1]


class RMSNormFP8(_NormToFP8):
    """``rms_norm_fp8`` of an x in 16 or 32 bits, as an operator."""

    name = "rms_norm_fp8"
    tensors = "Tensor x, Tensor? weight"
    outputs = ("q", "scale", "transposed", "carrier", "rstd")
    saved = "Tensor x, Tensor? weight, Tensor rstd"
    gradients = ("dx", "dw")

    def check(self, spec: NormSpec, *arguments: Any) -> None:
        x, weight = arguments[:2]
        check_norm(self.name, x, weight)
        check_recipe(self.name, *_recipe_in(arguments), x)

    def reference(self, spec: NormSpec, *arguments: Any) -> tuple[Any, ...]:
        x, weight = arguments[:2]
        return _cast_norm(reference.rms_norm(spec, x, weight), x, spec, arguments)

    def forward(self, spec: NormSpec, *arguments: Any, training: bool, launch: bool = True) -> tuple[Any, ...]:
        x, weight = arguments[:2]
        recipe, transposed = _recipe_in(arguments)
        outputs = empty_fp8_norm(spec, x, None, weight, recipe, transposed)
        if launch:
            launch_fp8_norm(spec, x, None, None, weight, recipe, outputs)
        return *outputs[:4], outputs.rstd

    def save(self, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Tensors, Facts]:
        return (*arguments[:2], results[-1]), ()

    def differentiate(self, spec: NormSpec, call: BackwardCall, by: Backward) -> tuple[Tensor | None, ...]:
        return RMS_NORM.differentiate(spec, call._replace(incoming=call.incoming[3:4]), by)


class AddRMSNormFP8(_NormToFP8):
    """``add_rms_norm_fp8`` as an operator."""

    name = "add_rms_norm_fp8"
    tensors = "Tensor x, Tensor residual, Tensor? weight"
    options = f"float scale, {_NormToFP8.options}"
    outputs = ("q", "scale", "transposed", "carrier", "s", "rstd")
    saved = "Tensor s, Tensor? weight, Tensor rstd"
    facts = ADD_RMS_NORM.facts
    gradients = ("dx", "dr", "dw")

    def check(self, spec: NormSpec, *arguments: Any) -> None:
        x, residual, weight, scale = arguments[:4]
        check_norm(self.name, x, weight)
        check_residual(self.name, x, residual)
        check_scale(self.name, scale)
        check_recipe(self.name, *_recipe_in(arguments), x)

    def reference(self, spec: NormSpec, *arguments: Any) -> tuple[Any, ...]:
        x, residual, weight, scale = arguments[:4]
        y, s = reference.add_rms_norm(spec, x, residual, weight, scale)
        *quantised, rstd = _cast_norm(y, s, spec, arguments)
        return *quantised, s.contiguous(), rstd

    def forward(self, spec: NormSpec, *arguments: Any, training: bool, launch: bool = True) -> tuple[Any, ...]:
        x, residual, weight, scale = arguments[:4]
        recipe, transposed = _recipe_in(arguments)
        outputs = empty_fp8_norm(spec, x, residual, weight, recipe, transposed)
        if launch:
            launch_fp8_norm(spec, x, None, residual, weight, recipe, outputs, scale)
        return outputs

    def save(self, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Tensors, Facts]:
        x, residual, weight, scale = arguments[:4]
        s, rstd = results[4:]
        return (s, weight, rstd), (x.dtype, residual.dtype, scale)

    def differentiate(self, spec: NormSpec, call: BackwardCall, by: Backward) -> tuple[Tensor | None, ...]:
        return ADD_RMS_NORM.differentiate(spec, call._replace(incoming=call.incoming[3:5]), by)


class RMSNormOfFP8(_NormToFP8):
    """``rms_norm_fp8`` of codes, as an operator; x is the carrier of what they stand for."""

    name = "rms_norm_of_fp8"
    tensors = "Tensor x, Tensor? weight, Tensor codes, Tensor codes_scale"
    outputs = RMSNormFP8.outputs
    saved = "Tensor codes, Tensor codes_scale, Tensor? weight, Tensor rstd"
    facts = "ScalarType x_dtype"
    gradients = ("dx", "dw")

    def takes(self, *arguments: Any) -> bool:
        return arguments[2].dtype in CODES_OF_KERNELS and super().takes(*arguments)

    def check(self, spec: NormSpec, *arguments: Any) -> None:
        x, weight, codes, scale = arguments[:4]
        if not codes.is_floating_point() or codes.dtype.itemsize != 1:
            raise TypeError(f"rms_norm_fp8: with x_scale x must be FP8 codes, not {codes.dtype}")
        if codes.dim() == 0 or codes.shape[-1] % INPUT_GROUP:
            raise ValueError(f"rms_norm_fp8: codes x must have groups of {INPUT_GROUP}, not shape {tuple(codes.shape)}")
        shape = (*codes.shape[:-1], codes.shape[-1] // INPUT_GROUP)
        if scale.shape != shape or scale.dtype not in KERNEL_DTYPES:
            raise ValueError(
                f"rms_norm_fp8: x_scale must have a number for each {INPUT_GROUP} columns of x, whose shape is"
                f" {tuple(codes.shape)}, not {tuple(scale.shape)} of {scale.dtype}"
            )
        if x.shape != codes.shape or x.device != codes.device or scale.device != codes.device:
            raise ValueError("rms_norm_fp8: x_carrier and x_scale must go with x, in shape and device")
        if spec.casting == "none":
            raise ValueError("rms_norm_fp8: casting 'none' rounds all it computes to x's dtype, which codes have not")
        check_norm("rms_norm_fp8", x, weight)
        check_recipe("rms_norm_fp8", *_recipe_in(arguments), x)

    def reference(self, spec: NormSpec, *arguments: Any) -> tuple[Any, ...]:
        x, weight, codes, scale = arguments[:4]
        values = on_carrier(numbers_of(codes, scale), x)
        return _cast_norm(reference.rms_norm(spec, values, weight, dtype=x.dtype), values, spec, arguments)

    def forward(self, spec: NormSpec, *arguments: Any, training: bool, launch: bool = True) -> tuple[Any, ...]:
        x, weight, codes, scale = arguments[:4]
        recipe, transposed = _recipe_in(arguments)
        outputs = empty_fp8_norm(spec, codes, None, weight, recipe, transposed, x.dtype)
        if launch:
            launch_fp8_norm(spec, codes, scale, None, weight, recipe, outputs, stands_for=x.dtype)
        return *outputs[:4], outputs.rstd

    def save(self, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Tensors, Facts]:
        x, weight, codes, scale = arguments[:4]
        return (codes, scale, weight, results[-1]), (x.dtype,)

    def backward(self, spec: NormSpec, call: BackwardCall, *, launch: bool = True) -> tuple[Tensor | None, ...]:
        codes, scale, weight, rstd = call.saved
        need_dx, need_dw = call.needed
        dx = codes.new_empty(codes.shape, dtype=call.facts[0]) if need_dx else None
        dw = weight.new_empty(weight.shape) if need_dw and weight is not None else None
        if launch:
            launch_backward_from_codes(spec, call.incoming[3], codes, scale, weight, rstd, dx, dw)
        return dx, dw

    def reference_backward(self, spec: NormSpec, call: BackwardCall) -> tuple[Tensor | None, ...]:
        codes, scale, weight, _ = call.saved
        dx, dw = reference.rms_norm_backward(spec, call.incoming[3], numbers_of(codes, scale), weight)
        return dx.to(call.facts[0]), dw


RMS_NORM_FP8 = RMSNormFP8()
ADD_RMS_NORM_FP8 = AddRMSNormFP8()
RMS_NORM_OF_FP8 = RMSNormOfFP8()


def rms_norm_fp8(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    recipe: str | FP8Recipe,
    casting: Casting = "llama",
    zero_centered: bool = False,
    x_scale: Tensor | None = None,
    x_carrier: Tensor | None = None,
    transposed: bool = False,
) -> Quantized:
    """RMSNorm whose result is written in FP8 alone.

    The norm is computed and rounded as ``rms_norm`` does it, and then cast: codes and scales are bit for bit those of
    ``quantize(rms_norm(x, weight, ...), recipe)``. The gradient goes straight through the cast. In a compiled graph
    that leaves a small call to the compiler, y is as precise as the compiler keeps it.

    Args:
        x: [..., N], dtypes and strides as in ``rms_norm``; or FP8 codes, where there is an ``x_scale``.
        weight: [N], or None.
        eps: as in ``rms_norm``; so are the next two.
        recipe: an ``FP8Recipe`` or the name of one, see ``RECIPES``.
        casting: rounding points and the dtype of y.
        zero_centered: gamma is ``1 + weight``.
        x_scale: the scales of FP8 codes x in groups of 16, [..., N / 16], as ``quantize(x, "coat_input")`` makes them.
            Products of codes and scales are taken as they are, in fp32; what a casting rounds to x's dtype is rounded
            to that of ``x_carrier``, bfloat16 where there is none. COAT's norm is that with casting ``gemma``.
        x_carrier: where the gradient of such an x goes, the ``carrier`` of its ``Quantized``.
        transposed: y's codes transposed as well, for recipes with one scale a tensor.

    Returns:
        Codes and scales of y, whose place in autograd's graph is ``carrier``.

    Raises:
        TypeError: for a dtype that is not floating point.
        ValueError: for an unknown recipe or casting, for groups that do not divide a row, for the transpose of codes
            that share their scale along a row, and where ``rms_norm`` raises it.
    """
    recipe, spec = recipe_of(recipe), norm_spec(casting, zero_centered, eps)
    options = (*recipe.options, transposed)
    if x_scale is None:
        q, scale, qt, carrier, rstd = RMS_NORM_FP8.checked(spec, x, weight, *options)
    else:
        if x_carrier is None:
            x_carrier = x.new_empty((), dtype=torch.bfloat16).expand(x.shape)
        q, scale, qt, carrier, rstd = RMS_NORM_OF_FP8.checked(spec, x_carrier, weight, x, x_scale, *options)
    return Quantized(q, scale, recipe, carrier, qt if transposed else None, rstd)


def add_rms_norm_fp8(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    recipe: str | FP8Recipe,
    casting: Casting = "llama",
    zero_centered: bool = False,
    scale: float = 1.0,
    transposed: bool = False,
) -> tuple[Quantized, Tensor]:
    """The residual add and the RMSNorm of its sum, whose result is written in FP8 alone.

    ``s = residual + x * scale`` as in ``add_rms_norm``, and the norm of that sum as in ``rms_norm_fp8``.

    Args:
        x: [..., N], the branch; dtypes and strides as in ``rms_norm``.
        residual: x's shape and device; its dtype may differ.
        weight: [N], or None.
        eps: as in ``rms_norm``, for the norm of the sum; so are casting and zero_centered.
        recipe: as in ``rms_norm_fp8``.
        casting: rounding points and the dtype of y.
        zero_centered: gamma is ``1 + weight``.
        scale: a Python number that the branch is multiplied by.
        transposed: as in ``rms_norm_fp8``.

    Returns:
        ``(quantized, s)``: the norm and the new residual, contiguous, of the dtype that x and residual promote to.

    Raises:
        TypeError: for a dtype that is not floating point, and for a scale that is not a Python number.
        ValueError: for a residual of another shape or device, and where ``rms_norm_fp8`` raises it.
    """
    recipe, spec = recipe_of(recipe), norm_spec(casting, zero_centered, eps)
    q, codes_scale, qt, carrier, s, rstd = ADD_RMS_NORM_FP8.checked(
        spec, x, residual, weight, scale, *recipe.options, transposed
    )
    return Quantized(q, codes_scale, recipe, carrier, qt if transposed else None, rstd), s


def check_recipe(name: str, recipe: FP8Recipe, transposed: bool, x: Tensor) -> None:
    """Raises ValueError where a recipe does not go with the rows of x, or is not along them."""
    if recipe.axis != -1:
        raise ValueError(f"{name}: scales must be shared along a row; rms_norm_columns_fp8 takes recipes along columns")
    check_groups(name, recipe, x.shape[-1], transposed)


def _cast_norm(y: Tensor, s: Tensor, spec: NormSpec, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Codes, scales, transposed codes, carrier and rstd, from the y that the reference has made of s."""
    with torch.no_grad():
        q, scale, qt = cast(y.detach(), *_recipe_in(arguments))
        wide = s.detach().to(torch.promote_types(s.dtype, torch.float32))
        rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + spec.eps).to(torch.float32)
    return q, scale, qt, carrier_of(y), rstd
