"""Norms and the float8 linears of torchao that read them: the norm quantises once what each linear would cast itself.

A linear of torchao keeps its input for the backward and casts it in the forward, and in the backward once more: as
before under tensorwise scales, along columns under rowwise ones, or not at all. Where all readers of a norm's result
are such linears, the norm gives out codes (``quantized_activation.py``), and its readers, which have a class of their
own for that, hand them to torchao's product in the place of their casts. Weights and gradients are cast, and all
products computed, by torchao's own functions: outputs and gradients have the same bits.

torchao is imported where the first linear is told of a norm, never before.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..kernels.fp8 import FP8Recipe, Quantized
from ..kernels.fp8.codes import runs_fp8_kernels_on
from ..kernels.fp8.norm_fp8 import ADD_RMS_NORM_FP8, RMS_NORM_FP8
from ..kernels.plans import WIDEST_FORWARD
from ..spec import NormSpec
from .fused_norm_module import has_hooks, has_origin_forward
from .quantized_activation import Codes, NormResult, QuantizedActivation, Remake, quantized_activation

logger = logging.getLogger("fused_norm")

Again = Literal["codes", "columns", "exact"]
"""What the product of a weight's gradient takes: the codes of the forward, those with scales along columns, or y."""


@dataclass(frozen=True)
class InputCast:
    """How a float8 linear casts its input.

    Attributes:
        recipe: for the product of the forward.
        again: for the product of the weight's gradient.
    """

    recipe: FP8Recipe
    again: Again

    @property
    def name(self) -> str:
        """The name that torchao has for it: tensorwise, rowwise or rowwise_with_gw_hp."""
        name = "tensorwise" if self.recipe.granularity == "tensor" else "rowwise"
        return f"{name}_with_gw_hp" if self.again == "exact" else name


class Float8Reader(nn.Module):
    """Base of the classes put on float8 linears that read a norm's result; each derives from the linear's own class."""

    fused_norm_origin: ClassVar[type[nn.Module]]
    fused_norm_origin_forward: ClassVar[Any]
    fused_norm_cast: ClassVar[InputCast]

    def forward(self, input: Any) -> Any:  # noqa: A002 - torchao's name
        """The linear of ``input``, which may have been quantised by a norm."""
        if type(input) is QuantizedActivation and input.has_codes() and has_origin_forward(type(self)):
            linear: Any = self
            if input.codes.recipe == self.fused_norm_cast.recipe:
                output = product_of_codes().apply(
                    input, linear.weight.t(), linear.linear_mm_config, linear.config, self.fused_norm_cast
                )
                return output if linear.bias is None else output + linear.bias.to(output.dtype)
        return self.fused_norm_origin.forward(self, input)


@dataclass(frozen=True, eq=False)
class NormReaders:
    """The float8 linears that read a norm's result.

    Attributes:
        input_cast: theirs.
        linears: each with the module that holds it and its name there.
        holders: the modules that take the result and hand it to the linears.
    """

    input_cast: InputCast
    linears: tuple[tuple[nn.Module, str, nn.Module], ...]
    holders: tuple[nn.Module, ...]

    def read(
        self, norm: nn.Module, spec: NormSpec, x: Tensor, residual: Tensor | None, weight: Tensor | None, scale: float
    ) -> Any:
        """The norm's result in FP8, and the sum where there is a residual; None where it has to give its result as is.

        Takes what the norm's own operator takes.
        """
        if not self.may_read(norm, x, residual, weight):
            return None
        recipe = self.input_cast.recipe
        if residual is None:
            q, dequantising, _, carrier, rstd = RMS_NORM_FP8(spec, x, weight, *recipe.options, False)
            s = x
        else:
            q, dequantising, _, carrier, s, rstd = ADD_RMS_NORM_FP8(
                spec, x, residual, weight, scale, *recipe.options, False
            )
        codes = Codes(q, dequantising.reciprocal(), recipe)
        result = NormResult(Remake(spec), (s.detach(), weight, rstd.detach()))
        y = quantized_activation(result, codes, carrier)
        return y if residual is None else (y, s)

    def may_read(self, norm: nn.Module, x: Tensor, residual: Tensor | None, weight: Tensor | None) -> bool:
        """Return whether the linears would get codes, and nobody else would see them."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return False
        tensors = [one for one in (x, residual, weight) if one is not None]
        if not any(one.requires_grad for one in tensors) or x.shape[-1] == 0 or x.numel() == 0:
            return False
        if not runs_fp8_kernels_on(self.input_cast.recipe, x) or x.shape[-1] > WIDEST_FORWARD:
            return False
        if not x.is_contiguous() or (residual is not None and not residual.is_contiguous()):
            return False
        if torch.is_autocast_enabled() and any(one.dtype != torch.get_autocast_dtype("cuda") for one in tensors):
            _explain_autocast()
            return False
        return why_not_read(norm, self.linears, self.holders) is None and all(
            type(linear).forward is Float8Reader.forward for _, _, linear in self.linears
        )


@cache
def _explain_autocast() -> None:
    """Log, once, that norms whose dtype autocast changes for their readers give no codes."""
    logger.warning("fp8: under autocast norms of another dtype than autocast's leave the casts to their float8 linears")


def why_not_read(
    norm: nn.Module, linears: Sequence[tuple[nn.Module, str, nn.Module]], holders: Sequence[nn.Module]
) -> str | None:
    """The reason why these modules have to get the norm's result as it is; None where they may get codes."""
    if has_hooks(norm) or "forward" in vars(norm):
        return "hooks or other code stand on its norm"
    for holder in holders:
        if has_hooks(holder) or "forward" in vars(holder) or holder._compiled_call_impl is not None:
            return f"hooks or other code stand on the {type(holder).__name__} that takes its result"
    for holder, name, linear in linears:
        if holder._modules.get(name) is not linear:
            return f"{name} was replaced"
        if has_hooks(linear) or "forward" in vars(linear) or linear._compiled_call_impl is not None:
            return f"hooks or other code stand on {name}"
        weight: Any = linear.weight
        if hasattr(weight, "placements"):
            return f"the weight of {name} is a {type(weight).__name__}"
        if hasattr(weight, "ds_id"):
            return f"DeepSpeed has taken the weight of {name} apart"
    return None


class _Context:
    """What torchao's function gets in the place of autograd's context."""

    def __init__(self, *saved: Any, **attributes: Any) -> None:
        self.saved_tensors = saved
        vars(self).update(attributes)

    def save_for_backward(self, *tensors: Any) -> None:
        """Let go of what torchao would keep."""


@cache
def product_of_codes() -> Any:
    """The autograd function that multiplies a norm's codes with a weight as torchao does."""
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args as torchao_product
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    def cast_already(q: Tensor, multiplier: Tensor, dtype: torch.dtype, mm_config: Any, axis: int | None) -> Tensor:
        """Codes as torchao has them, which it takes for an input that was cast already."""
        return Float8TrainingTensor(q, multiplier, dtype, mm_config, GemmInputRole.INPUT, axis)

    class ProductOfCodes(torch.autograd.Function):
        """torchao's product, forward and backward, its input replaced by what was made of codes."""

        @staticmethod
        def forward(
            ctx: Any, activation: QuantizedActivation, weight_t: Tensor, mm_config: Any, config: Any, cast: InputCast
        ) -> Tensor:
            codes, shape, result = activation.codes, activation.shape, activation.result
            multiplier, axis = codes.multiplier, None
            if cast.recipe.granularity == "row":
                multiplier, axis = multiplier.view(*shape[:-1], 1), -1
            given = cast_already(codes.q.view(shape), multiplier, activation.dtype, mm_config, axis)
            output: Tensor = torchao_product.forward(_Context(), given, weight_t, mm_config, config)
            result.remake.readers += 1
            # Plain tensors, which hooks of others on what is saved know. Under rowwise scales codes are of no use any
            # more, and are freed with the forward's last reader.
            kept = (codes.q, codes.multiplier) if cast.again == "codes" else result.kept
            ctx.save_for_backward(weight_t, *kept)
            ctx.mm_config, ctx.config, ctx.cast = mm_config, config, cast
            ctx.remake, ctx.dtype = result.remake, activation.dtype
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            weight_t, *kept = ctx.saved_tensors
            given = made_again(ctx, *kept)
            context = _Context(given, weight_t, linear_mm_config=ctx.mm_config, config=ctx.config)
            dx, dw, *_ = torchao_product.backward(context, *gradients)
            return dx, dw, None, None, None

    def made_again(ctx: Any, *kept: Any) -> Tensor:
        """What the product of the weight's gradient takes: [M, N], y itself or codes."""
        remake, cast = ctx.remake, ctx.cast
        if cast.again == "exact":
            y: Tensor = remake.once(lambda: remake.y(*kept))
            return y.view(-1, y.shape[-1])
        emulated = ctx.mm_config.grad_weight.emulate
        if cast.again == "columns":
            q, multiplier = remake.once(lambda: _columns(remake.columns(cast.recipe, *kept), emulated))
        else:
            q, multiplier = remake.once(lambda: _by_column(*kept, emulated=emulated))
        return cast_already(q, multiplier, ctx.dtype, ctx.mm_config, 0 if cast.again == "columns" else None)

    return ProductOfCodes


def _columns(codes: Quantized, emulated: bool) -> tuple[Tensor, Tensor]:
    """Codes [M, N] with scales along columns, and what they were multiplied by."""
    # The order of an emulated product's sums may depend on how its factors lie in memory.
    return codes.q.contiguous() if emulated else codes.q, codes.scale.reciprocal()


def _by_column(q: Tensor, multiplier: Tensor, *, emulated: bool) -> tuple[Tensor, Tensor]:
    """The codes as [M, N], column by column, as scaled products want them: torchao would copy them for each reader."""
    q = q.view(-1, q.shape[-1])
    return q if emulated else q.t().contiguous().t(), multiplier
