"""A norm made again in the backward, in FP8 that is scaled over rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...spec import Casting, NormSpec
from ..norm_from_rstd import NORM_FROM_RSTD
from ..operator import Facts, Operator, Tensors, norm_spec
from .cast import cast, check_groups
from .codes import runs_fp8_kernels_on
from .column_kernels import empty_columns_fp8, launch_columns_fp8
from .quantized import Quantized
from .recipe import RECIPE_OPTIONS, FP8Recipe, recipe_from, recipe_of


class RMSNormColumnsFP8(Operator):
    """``rms_norm_columns_fp8`` as an operator, which has no gradients; it gives codes as [N, M]."""

    name = "rms_norm_columns_fp8"
    tensors = "Tensor x, Tensor? weight, Tensor rstd"
    options = RECIPE_OPTIONS
    outputs = ("q", "scale")
    not_differentiable = outputs
    saved = ""
    gradients = ()

    def check(self, spec: NormSpec, *arguments: Any) -> None:
        NORM_FROM_RSTD.check(spec, *arguments[:3])
        check_groups(self.name, recipe_from(arguments[3:]), arguments[0].shape[-1], False)

    def takes(self, *arguments: Any) -> bool:
        return runs_fp8_kernels_on(recipe_from(arguments[3:]), *arguments[:3])

    def reference(self, spec: NormSpec, *arguments: Any) -> tuple[Any, ...]:
        q, scale, _ = cast(NORM_FROM_RSTD.reference(spec, *arguments[:3]), recipe_from(arguments[3:]))
        return q.t(), scale

    def forward(self, spec: NormSpec, *arguments: Any, training: bool, launch: bool = True) -> tuple[Any, ...]:
        x, weight, rstd, *options = arguments
        recipe = recipe_from(options)
        outputs = empty_columns_fp8(x, recipe)
        if launch:
            launch_columns_fp8(spec, x, weight, rstd, recipe, *outputs)
        return outputs

    def save(self, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Tensors, Facts]:
        return (), ()


RMS_NORM_COLUMNS_FP8 = RMSNormColumnsFP8()


def rms_norm_columns_fp8(
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float = 1e-6,
    *,
    recipe: str | FP8Recipe,
    casting: Casting = "llama",
    zero_centered: bool = False,
) -> Quantized:
    """A norm once more, from what its forward has kept, as the product of a weight's gradient wants it.

    That product sums over rows, so scales are shared along columns: codes and scales are bit for bit those of
    ``quantize(y, recipe.along_rows())``, y being the norm that the forward has made and not kept.

    Args:
        x: [..., N], what was normalised: the sum, where there was a residual.
        weight: [N], or None.
        rstd: fp32 [..., 1], as the forward's ``Quantized`` has it.
        eps: as in the forward; so are casting and zero_centered.
        recipe: the forward's, or its name; of its granularities ``row`` becomes one scale for each column.
        casting: the rounding points.
        zero_centered: gamma is ``1 + weight``.

    Returns:
        Codes [M, N] column by column and their scales, see ``Quantized``; no gradient.

    Raises:
        ValueError: for a recipe with one scale for the tensor, whose codes are the forward's; for casting ``none``,
            under which the forward uses another rstd than it keeps; and for shapes that do not fit.
    """
    recipe, spec = recipe_of(recipe).along_rows(), norm_spec(casting, zero_centered, eps)
    with torch.no_grad():
        q, scale = RMS_NORM_COLUMNS_FP8.checked(spec, x, weight, rstd, *recipe.options)
    return Quantized(q.t(), scale, recipe)
