"""A norm made again in the backward, in FP8 that is scaled over rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ...spec import Casting
from ..norm_from_rstd import NORM_FROM_RSTD
from ..operator import norm_spec
from .cast import cast, check_groups
from .quantized import Quantized
from .recipe import FP8Recipe, recipe_of


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
    name, recipe = "rms_norm_columns_fp8", recipe_of(recipe).along_rows()
    check_groups(name, recipe, x.shape[-1], False)
    spec = norm_spec(casting, zero_centered, eps)
    with torch.no_grad():
        y = NORM_FROM_RSTD.checked(spec, x, weight, rstd)
        q, scale, _ = cast(y, recipe)
    return Quantized(q, scale, recipe)
