"""RMSNorm, with or without the residual add before it, that writes its result in FP8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...spec import Casting, NormSpec
from .. import reference
from ..arguments import KERNEL_DTYPES, Unsupported, check_scale
from ..norm import ADD_RMS_NORM
from ..operator import BackwardArguments, BackwardImpl, Operator, Results, Scalars, Tensors, norm_spec
from ..plans import WIDEST_BACKWARD, WIDEST_FORWARD
from ..triton.call import Call
from ..triton.norm_backward import NormGradients, NormSaved, launch_norm_backward
from .formats import (
    FORMATS,
    INPUT_GROUP,
    FP8Format,
    Quantized,
    cast,
    check_width,
    name_of_format,
    numbers_of,
    placeholder_of,
)
from .kernels import CODES_OF_KERNELS, empty_norm_fp8, launch_norm_fp8, runs_fp8_kernels_on


class NormFP8(Operator):
    """``rms_norm_fp8`` and ``add_rms_norm_fp8`` as an operator; if there are codes, x is their placeholder.

    Its last option is the name of the format.
    """

    name = "norm_fp8"
    tensors = "Tensor x, Tensor? residual, Tensor? weight, Tensor? codes, Tensor? codes_scale"
    options = "NormSpec spec, float scale, str fp8_format"
    outputs = ("q", "scale", "placeholder", "s", "rstd")
    not_differentiable = ("q", "scale", "rstd")
    same_shape = ("residual",)
    other_rules = ("codes", "codes_scale")
    saved = "Tensor s, Tensor? codes_scale, Tensor? weight, Tensor rstd"
    saved_scalars = f"{ADD_RMS_NORM.saved_scalars}, bool added"
    gradients = ("dx", "dr", "dw")

    def public_name(self, *arguments: Any) -> str:
        return "rms_norm_fp8" if arguments[1] is None else "add_rms_norm_fp8"

    def check_options(self, *arguments: Any) -> Unsupported | None:
        x, _, _, codes, codes_scale, spec, scale, name = arguments
        refusal = None if codes is None else _check_codes(spec, x, codes, codes_scale)
        return refusal or check_width(FORMATS[name], x.shape[-1]) or check_scale(scale)

    def why_reference_only(self, *arguments: Any) -> Unsupported | None:
        tensors = arguments[: self.tensor_count]
        if tensors[3] is not None and tensors[3].dtype not in CODES_OF_KERNELS:
            return Unsupported(f"the codes of x are {tensors[3].dtype}")
        fits = arguments[0].shape[-1] <= WIDEST_FORWARD and runs_fp8_kernels_on(*tensors)
        return None if fits else Unsupported("its rows or codes are none of kernels")

    def reference(self, *arguments: Any) -> tuple[Any, ...]:
        x, residual, weight, codes, codes_scale, spec, scale, name = arguments
        if residual is None:
            total = x if codes is None else reference.with_gradient_to(numbers_of(codes, codes_scale), x)
            y, s = reference.rms_norm(spec, total, weight, dtype=x.dtype), None
        else:
            y, total = reference.add_rms_norm(spec, x, residual, weight, scale)
            s = total.contiguous()
        with torch.no_grad():
            q, scales = cast(y.detach(), FORMATS[name])
            wide = total.detach().to(torch.promote_types(total.dtype, torch.float32))
            rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + spec.eps).to(torch.float32)
        return q, scales, placeholder_of(y), s, rstd

    def forward(self, call: Call, *arguments: Any, training: bool) -> Results:
        x, residual, weight, _, _, spec, scale, name = arguments
        outputs = empty_norm_fp8(call, spec, x, residual, weight, FORMATS[name])
        call.then(launch_norm_fp8, spec, arguments[: self.tensor_count], FORMATS[name], outputs, scale)
        return outputs

    def save(self, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Tensors, Scalars]:
        x, residual, weight, codes, codes_scale, spec, scale, _ = arguments
        s, rstd = results[3:]
        added = residual is not None
        if not added:
            s, residual = x if codes is None else codes, x
        return (s, codes_scale, weight, rstd), (spec, x.dtype, residual.dtype, scale, added)

    def saves_input(self, name: str, tensors: Tensors) -> bool:
        _, residual, _, codes, _ = tensors
        s = "s" if residual is not None else "x" if codes is None else "codes"
        return name == s or super().saves_input(name, tensors)

    def compute_grads(self, impl: BackwardImpl, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        s, codes_scale, weight, rstd = given.saved
        if codes_scale is not None:
            return super().compute_grads(impl, given)
        *scalars, added = given.saved_scalars
        dy, ds = given.incoming[2:4]
        # Without a residual s is empty, and compiled graphs give even that a gradient.
        given = given._replace(
            incoming=(dy, ds if added else None), saved=(s, weight, rstd), saved_scalars=tuple(scalars)
        )
        return ADD_RMS_NORM.compute_grads(impl, given)

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        """Launch the backward of a norm of codes; that of other tensors is ``add_rms_norm``'s."""
        (codes, codes_scale, weight, rstd), (spec, x_dtype, *_) = given.saved, given.saved_scalars
        need_dx, _, need_dw = given.needed
        dx = call.empty_rows_like(codes, x_dtype) if need_dx else None
        dw = call.empty_weight_like(weight, need_dw)
        saved = NormSaved(given.incoming[2], None, codes, weight, rstd, s_scale=codes_scale)
        call.then(_launch_backward_of_codes, spec, saved, NormGradients(dx, None, dw))
        return dx, None, dw

    def reference_backward(self, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (codes, codes_scale, weight, _), (spec, x_dtype, *_) = given.saved, given.saved_scalars
        dx, dw = reference.rms_norm_backward(spec, given.incoming[2], numbers_of(codes, codes_scale), weight)
        return dx.to(x_dtype), None, dw


def _launch_backward_of_codes(call: Call, spec: NormSpec, saved: NormSaved, gradients: NormGradients) -> None:
    """Write the gradients of a norm of codes, which are numbers again first if a row of them cannot be held."""
    if saved.s_scale is not None and saved.s.shape[-1] > WIDEST_BACKWARD:
        saved = saved._replace(s=numbers_of(saved.s, saved.s_scale), s_scale=None)
    launch_norm_backward(call, spec, saved, gradients)


NORM_FP8 = NormFP8()


def rms_norm_fp8(
    x: Tensor | Quantized,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    fp8_format: str | FP8Format,
    casting: Casting = "llama",
    zero_centered: bool = False,
) -> Quantized:
    """RMSNorm whose result is written in FP8 alone.

    The norm is computed and rounded as ``rms_norm`` does it, and then cast: codes and scales are bit for bit those of
    ``quantize(rms_norm(x, weight, ...), fp8_format)``. The gradient goes straight through the cast. In a compiled graph
    that leaves a small call to the compiler, y is as precise as the compiler keeps it.

    Args:
        x: [..., N], dtypes and strides as in ``rms_norm``; or codes with scales in groups of 16, as ``quantize(x,
            "coat_input")`` makes them. Products of codes and scales are taken as they are, in fp32; what a casting
            rounds to x's dtype is rounded to that of x's placeholder, which gets the gradient: bfloat16 if there is
            none. COAT's norm is that with casting ``gemma``.
        weight: [N], or None.
        eps: as in ``rms_norm``; so are casting and zero_centered.
        fp8_format: a format of ``FORMATS`` or its name.
        casting: rounding points and the dtype of y.
        zero_centered: gamma is ``1 + weight``.

    Returns:
        Codes and scales of y, whose place in autograd's graph is ``placeholder``.

    Raises:
        TypeError: for a dtype that is not floating point.
        ValueError: for an unknown format or casting, for groups that do not divide a row, and as ``rms_norm`` does.
    """
    name, spec = name_of_format(fp8_format), norm_spec(casting, zero_centered, eps)
    tensors: tuple[Any, ...] = x, None, weight, None, None
    if isinstance(x, Quantized):
        for part, tensor in (("codes", x.q), ("scales", x.scale)):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"rms_norm_fp8: the {part} of x must be a tensor, not {type(tensor).__name__}")
        placeholder = (
            x.q.new_empty((), dtype=torch.bfloat16).expand(x.q.shape) if x.placeholder is None else x.placeholder
        )
        tensors = placeholder, None, weight, x.q, x.scale
    q, scales, y, _, rstd = NORM_FP8.checked(*tensors, spec, 1.0, name)
    return Quantized(q, scales, FORMATS[name], y, rstd)


def add_rms_norm_fp8(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    fp8_format: str | FP8Format,
    casting: Casting = "llama",
    zero_centered: bool = False,
    scale: float = 1.0,
) -> tuple[Quantized, Tensor]:
    """The residual add and the RMSNorm of its sum, whose result is written in FP8 alone.

    ``s = residual + x * scale`` as in ``add_rms_norm``, and the norm of that sum as in ``rms_norm_fp8``.

    Args:
        x: [..., N], the branch; dtypes and strides as in ``rms_norm``.
        residual: x's shape and device; its dtype may differ.
        weight: [N], or None.
        eps: as in ``rms_norm``, for the norm of the sum; so are casting and zero_centered.
        fp8_format: as in ``rms_norm_fp8``.
        casting: rounding points and the dtype of y.
        zero_centered: gamma is ``1 + weight``.
        scale: a Python number that the branch is multiplied by.

    Returns:
        ``(quantized, s)``: the norm and the new residual, contiguous, of the dtype that x and residual promote to.

    Raises:
        TypeError: for a dtype that is not floating point, and for a scale that is not a Python number.
        ValueError: for a residual of another shape or device, and as ``rms_norm_fp8`` does.
    """
    name, spec = name_of_format(fp8_format), norm_spec(casting, zero_centered, eps)
    if residual is None:
        raise TypeError("add_rms_norm_fp8: residual must be a tensor, not NoneType; rms_norm_fp8 takes none")
    q, scales, placeholder, s, rstd = NORM_FP8.checked(x, residual, weight, None, None, spec, scale, name)
    return Quantized(q, scales, FORMATS[name], placeholder, rstd), s


def _check_codes(spec: NormSpec, x: Tensor, codes: Tensor, scale: Tensor) -> Unsupported | None:
    """Refuse codes, scales and a placeholder x that no norm can read."""
    if not codes.is_floating_point() or codes.dtype.itemsize != 1:
        return Unsupported(f"the codes of x must be FP8, not {codes.dtype}", TypeError)
    if codes.dim() == 0 or codes.shape[-1] % INPUT_GROUP:
        reason = f"the codes of x must have groups of {INPUT_GROUP}, not shape {tuple(codes.shape)}"
    elif scale.shape != (*codes.shape[:-1], codes.shape[-1] // INPUT_GROUP) or scale.dtype not in KERNEL_DTYPES:
        reason = (
            f"the scales of x must be a number for each {INPUT_GROUP} columns of its codes, whose shape is"
            f" {tuple(codes.shape)}, not {tuple(scale.shape)} of {scale.dtype}"
        )
    elif x.shape != codes.shape or x.device != codes.device or scale.device != codes.device:
        reason = "placeholder and scales of x must go with its codes, in shape and device"
    elif spec.casting == "none":
        reason = "casting 'none' rounds all it computes to x's dtype, which codes have not"
    else:
        return None
    return Unsupported(reason, ValueError)
