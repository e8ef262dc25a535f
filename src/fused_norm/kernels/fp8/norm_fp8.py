"""RMSNorm, with or without the residual add in front of it, that gives its result in FP8."""

from __future__ import annotations

import torch
from torch import Tensor

from ...spec import Casting, NormSpec
from .. import reference
from ..arguments import check_norm, check_residual, check_scale
from ..operator import norm_spec
from .cast import cast, check_groups
from .quantized import Quantized, carrier_of, on_carrier
from .recipe import RECIPES, FP8Recipe, recipe_of

_INPUT_GROUP = RECIPES["coat_input"].group


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
    ``quantize(rms_norm(x, weight, ...), recipe)``. The gradient goes straight through the cast.

    Args:
        x: [..., N], dtypes and strides as in ``rms_norm``; or FP8 codes, where there is an ``x_scale``.
        weight: [N], or None.
        eps: as in ``rms_norm``; so are the next two.
        recipe: an ``FP8Recipe`` or the name of one, see ``RECIPES``.
        casting: rounding points and the dtype of y.
        zero_centered: gamma is ``1 + weight``.
        x_scale: the scales of FP8 codes x in groups of 16, [..., N / 16], as ``quantize(x, "coat_input")`` makes them.
            Products of codes and scales are taken as they are, in fp32; what a casting rounds to x's dtype is rounded
            to that of ``x_carrier``, bfloat16 where there is none.
        x_carrier: where the gradient of such an x goes, the ``carrier`` of its ``Quantized``.
        transposed: y's codes transposed as well, for recipes with one scale a tensor.

    Returns:
        Codes and scales of y, whose place in autograd's graph is ``carrier``.

    Raises:
        TypeError: for a dtype that is not floating point.
        ValueError: for an unknown recipe or casting, for groups that do not divide a row, for the transpose of codes
            that share their scale along a row, and where ``rms_norm`` raises it.
    """
    name, recipe, spec = "rms_norm_fp8", recipe_of(recipe), norm_spec(casting, zero_centered, eps)
    if x_scale is None:
        check_norm(name, x, weight)
        y, s = reference.rms_norm(spec, x, weight), x
    else:
        s, dtype = _dequantised(name, spec, x, x_scale, x_carrier, weight)
        y = reference.rms_norm(spec, s, weight, dtype=dtype)
    check_recipe(name, recipe, x, transposed)
    return _quantised(y, s, spec, recipe, transposed)


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
    name, recipe, spec = "add_rms_norm_fp8", recipe_of(recipe), norm_spec(casting, zero_centered, eps)
    check_norm(name, x, weight)
    check_residual(name, x, residual)
    check_scale(name, scale)
    check_recipe(name, recipe, x, transposed)
    y, s = reference.add_rms_norm(spec, x, residual, weight, scale)
    s = s.contiguous()
    return _quantised(y, s, spec, recipe, transposed), s


def check_recipe(name: str, recipe: FP8Recipe, x: Tensor, transposed: bool) -> None:
    """Raises ValueError where a recipe does not go with the rows of x, or is not along them."""
    if recipe.axis != -1:
        raise ValueError(f"{name}: scales must be shared along a row; rms_norm_columns_fp8 takes recipes along columns")
    check_groups(name, recipe, x.shape[-1], transposed)


def _quantised(y: Tensor, s: Tensor, spec: NormSpec, recipe: FP8Recipe, transposed: bool) -> Quantized:
    """What a norm returns for the y that the reference has made of s."""
    rstd = None
    with torch.no_grad():
        q, scale, qt = cast(y.detach(), recipe, transposed)
        if y.requires_grad:
            wide = s.detach().to(torch.promote_types(s.dtype, torch.float32))
            rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + spec.eps).to(torch.float32)
    return Quantized(q, scale, recipe, carrier_of(y), qt, rstd)


def _dequantised(
    name: str, spec: NormSpec, x: Tensor, x_scale: Tensor, carrier: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, torch.dtype]:
    """Codes times scales in fp32, and the dtype of the tensor that they stand for."""
    if not x.dtype.itemsize == 1 or not x.is_floating_point():
        raise TypeError(f"{name}: with x_scale x must be FP8 codes, not {x.dtype}")
    if x.dim() == 0 or x.shape[-1] % _INPUT_GROUP or x_scale.shape != (*x.shape[:-1], x.shape[-1] // _INPUT_GROUP):
        raise ValueError(
            f"{name}: x_scale must have a scale for each {_INPUT_GROUP} columns of x, not shape {tuple(x_scale.shape)}"
            f" for x's {tuple(x.shape)}"
        )
    if carrier is not None and carrier.shape != x.shape:
        raise ValueError(f"{name}: x_carrier has shape {tuple(carrier.shape)}, and x {tuple(x.shape)}")
    if spec.casting == "none":
        raise ValueError(f"{name}: casting 'none' rounds what it computes to x's dtype, and codes have none")
    grouped = x.detach().to(torch.float32).unflatten(-1, (-1, _INPUT_GROUP))
    values = (grouped * x_scale.detach().to(torch.float32).unsqueeze(-1)).flatten(-2)
    check_norm(name, values, weight)
    return on_carrier(values, carrier), torch.bfloat16 if carrier is None else carrier.dtype
