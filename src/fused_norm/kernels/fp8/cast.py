"""The casts to FP8 and back in plain PyTorch: the truth in tests, and the path of tensors that no kernel runs on."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .quantized import Quantized, carrier_of
from .recipe import RECIPES, FP8Recipe, recipe_of

INPUT_GROUP = RECIPES["coat_input"].group
"""Columns that share a scale where a norm reads codes."""

_BIAS = 127
"""Of the exponents of fp32 and E8M0."""


def quantize(y: Tensor, recipe: str | FP8Recipe, transposed: bool = False) -> Quantized:
    """Cast to FP8 by PyTorch's own operators, on any device.

    Values beyond the largest code become it. A NaN takes with it what shares its scale, as the recipe's own casts do;
    zeros stay zeros.

    Args:
        y: [..., N], of any floating dtype.
        recipe: a recipe or its name, see ``RECIPES``.
        transposed: y's codes transposed as well, for recipes with one scale a tensor.

    Returns:
        Codes and scales; its carrier hands gradients straight to y.

    Raises:
        TypeError: for a dtype that is not floating point.
        ValueError: for an unknown recipe, for groups that do not divide a row, and for the transpose of codes that
            share their scale along a row.
    """
    recipe = recipe_of(recipe)
    if not y.is_floating_point() or y.dim() == 0:
        raise TypeError(f"quantize: y must be floating point of one dimension and more, not {y.dtype} {tuple(y.shape)}")
    check_groups("quantize", recipe, y.shape[-1], transposed)
    with torch.no_grad():
        q, scale, qt = cast(y.detach(), recipe, transposed)
    return Quantized(q, scale, recipe, carrier_of(y), qt)


def dequantize(codes: Quantized) -> Tensor:
    """The numbers that codes and scales stand for: fp32, contiguous, in the shape of ``codes.q``; no gradient."""
    recipe, q = codes.recipe, codes.q.detach()
    along_rows = recipe.axis == 0
    values = q.to(torch.float32)
    if recipe.granularity != "group":
        return (values * codes.scale).contiguous()
    rows = values.t() if along_rows else values.reshape(math.prod(q.shape[:-1]), q.shape[-1])
    groups = -(-rows.shape[1] // recipe.group)
    if recipe.layout == "swizzled":
        scale = _unswizzled(codes.scale, rows.shape[0], groups).to(torch.float32)
    else:
        scale = codes.scale.t() if along_rows else codes.scale.reshape(rows.shape[0], groups)
    rows = rows * scale.repeat_interleave(recipe.group, dim=1)[:, : rows.shape[1]]
    return rows.t().contiguous() if along_rows else rows.reshape(q.shape)


def numbers_of(codes: Tensor, scale: Tensor) -> Tensor:
    """The products of codes [..., N] and their scales [..., N / 16], in fp32."""
    grouped = codes.detach().to(torch.float32).unflatten(-1, (-1, INPUT_GROUP))
    return (grouped * scale.detach().to(torch.float32).unsqueeze(-1)).flatten(-2)


def check_groups(name: str, recipe: FP8Recipe, width: int, transposed: bool) -> None:
    """Raises ValueError, naming the operator ``name``, where a recipe does not go with rows of ``width`` elements."""
    if recipe.axis == -1 and recipe.group and width % recipe.group:
        raise ValueError(
            f"{name}: rows of {width} elements cannot be divided into groups of {recipe.group}; take a recipe with a"
            " scale for each row or for the tensor"
        )
    if transposed and recipe.granularity != "tensor":
        raise ValueError(
            f"{name}: codes that share their scale along a row are of no use transposed; take rms_norm_columns_fp8 or"
            " a recipe with one scale for the tensor"
        )
    if recipe.granularity == "tensor" and recipe.axis == 0:
        raise ValueError(f"{name}: with one scale for the tensor both axes are alike; ask for its codes transposed")


def cast(y: Tensor, recipe: FP8Recipe, transposed: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and, if asked for, transposed codes of good arguments."""
    rows, width = math.prod(y.shape[:-1]), y.shape[-1]
    if recipe.axis == 0:
        q, scale = _cast_along_rows(y.reshape(rows, width), recipe)
        return q, scale, None
    y = y.contiguous()
    if recipe.granularity != "group":
        amax = _amax(y.reshape(1, -1) if recipe.granularity == "tensor" else y)
        q, scale = cast_groups(y, amax.reshape(()) if recipe.granularity == "tensor" else amax, recipe)
        return q, scale, q.reshape(rows, width).t().contiguous() if transposed else None
    grouped = y.reshape(rows, width // recipe.group, recipe.group)
    q, scale = cast_groups(grouped, _amax(grouped), recipe)
    scale = scale.squeeze(-1)
    if recipe.layout == "swizzled":
        scale = swizzled(scale)
    elif recipe.layout == "columns":
        scale = empty_columns(scale, rows, width // recipe.group, recipe.aligned).copy_(scale)
    else:
        scale = scale.reshape(*y.shape[:-1], width // recipe.group)
    return q.reshape(y.shape), scale, None


def empty_columns(like: Tensor, rows: int, columns: int, aligned: int) -> Tensor:
    """An empty fp32 tensor of rows and columns, column by column, each beginning at a multiple of ``aligned``."""
    step = -(-rows // aligned) * aligned
    return like.new_empty((columns, step), dtype=torch.float32)[:, :rows].t()


def empty_swizzled(like: Tensor, rows: int, groups: int, *, zeros: bool = False) -> Tensor:
    """Empty E8M0 scales in blocks of 32 by 16, or the smallest one everywhere, which is how padding looks."""
    shape = 32 * -(-rows // 128), 16 * -(-groups // 4)
    made = like.new_zeros(shape, dtype=torch.uint8) if zeros else like.new_empty(shape, dtype=torch.uint8)
    return made.view(torch.float8_e8m0fnu)


def swizzled(scale: Tensor) -> Tensor:
    """E8M0 scales [M, G] in blocks of 32 by 16, see ``FP8Recipe``."""
    rows, groups = scale.shape
    blocks = -(-rows // 128), -(-groups // 4)
    padded = torch.zeros(128 * blocks[0], 4 * blocks[1], dtype=torch.uint8, device=scale.device)
    padded[:rows, :groups] = scale.view(torch.uint8)
    tiles = padded.reshape(blocks[0], 4, 32, blocks[1], 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(32 * blocks[0], 16 * blocks[1]).view(torch.float8_e8m0fnu)


def _unswizzled(scale: Tensor, rows: int, groups: int) -> Tensor:
    blocks = -(-rows // 128), -(-groups // 4)
    tiles = scale.view(torch.uint8).reshape(blocks[0], blocks[1], 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(128 * blocks[0], 4 * blocks[1])[:rows, :groups].contiguous().view(torch.float8_e8m0fnu)


def _cast_along_rows(y: Tensor, recipe: FP8Recipe) -> tuple[Tensor, Tensor]:
    """Codes and scales of y [M, N], the scales shared along columns: those of its transpose, row by row."""
    rows = y.shape[0]
    if recipe.granularity == "row":
        q, scale = cast_groups(y.t().contiguous(), _amax(y.t()), recipe)
        return q.t(), scale.reshape(1, -1)
    groups = -(-rows // recipe.group)
    padded = y.new_zeros(y.shape[1], groups * recipe.group)
    padded[:, :rows] = y.t()
    grouped = padded.reshape(y.shape[1], groups, recipe.group)
    q, scale = cast_groups(grouped, _amax(grouped), recipe)
    scale = scale.squeeze(-1)
    scale = swizzled(scale) if recipe.layout == "swizzled" else scale.t().clone(memory_format=torch.contiguous_format)
    return q.reshape(y.shape[1], groups * recipe.group)[:, :rows].contiguous().t(), scale


def _amax(values: Tensor) -> Tensor:
    """The largest magnitude along the last dimension, which stays; 0 of nothing, NaN where there is one."""
    if values.shape[-1] == 0:
        return values.new_zeros(*values.shape[:-1], 1)
    return values.abs().amax(-1, keepdim=True)


def cast_groups(values: Tensor, amax: Tensor, recipe: FP8Recipe) -> tuple[Tensor, Tensor]:
    """The codes of values and their scales, given the magnitudes that scales are for, which broadcast against them."""
    top = torch.finfo(recipe.dtype).max
    values, amax = values.to(torch.float32), amax.to(torch.float32)
    if recipe.formula == "multiplier":
        multiplier = (top / amax.to(torch.float64).clamp(min=recipe.floor)).to(torch.float32)
        if recipe.power_of_2:
            multiplier = torch.exp2(torch.floor(torch.log2(multiplier)))
        scaled, scale = values * multiplier, 1.0 / multiplier
    elif recipe.formula in ("reciprocal", "quotient"):
        scale = _quotient(amax.clamp(min=recipe.floor) if recipe.formula == "reciprocal" else amax + recipe.floor, top)
        if recipe.power_of_2:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        scaled = values * (1.0 / scale) if recipe.formula == "reciprocal" else values / scale
    else:
        exponent, factor = _power_of_2(amax, recipe.formula, top)
        scaled, scale = values * factor, exponent.to(torch.uint8).view(torch.float8_e8m0fnu)
    # A cast by itself saturates in some releases of PyTorch, and makes NaN in others.
    return scaled.clamp(-top, top).to(recipe.dtype), scale


def _power_of_2(amax: Tensor, formula: str, top: float) -> tuple[Tensor, Tensor]:
    """The biased exponents of E8M0 scales, 255 for NaN, and what values are multiplied by."""
    if formula == "floor":
        exponent = ((amax.view(torch.int32) >> 23) - int(math.log2(top))).clamp(min=0)
        # The factor of the smallest scale, a subnormal, is that of the next; zeros alone have it, and less than top.
        factor = torch.exp2(_BIAS - exponent.clamp(min=1).to(torch.float32))
        exponent = torch.where(amax.isnan(), 255, exponent)
        return exponent, torch.where(amax.isnan(), 0.0, factor)
    scale = _quotient(amax, top)
    exponent = torch.ceil(torch.log2(scale)).clamp(-_BIAS, _BIAS) + _BIAS
    exponent = torch.where(amax.isnan(), 255.0, torch.where(scale.isinf(), 254.0, exponent))
    factor = torch.where(exponent == 0, 1.0, torch.exp2(_BIAS - exponent))
    return exponent, torch.where(amax.isnan(), amax, factor)


def _quotient(values: Tensor, divisor: float) -> Tensor:
    """A division that is rounded once: on CUDA PyTorch's own, by a number, multiplies by the reciprocal of it."""
    return values / torch.full((), divisor, dtype=values.dtype, device=values.device)
