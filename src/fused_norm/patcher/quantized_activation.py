"""The result of a norm whose readers are float8 linears: FP8 codes that everybody else sees as the tensor itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ..kernels.fp8 import FP8Recipe, Quantized, rms_norm_columns_fp8
from ..kernels.norm_from_rstd import NORM_FROM_RSTD
from ..spec import NormSpec
from .recompute import check_version, current_stream, is_freed

_aten = torch.ops.aten


class Codes(NamedTuple):
    """FP8 codes of a norm's result.

    Attributes:
        q: the codes, in the result's shape.
        multiplier: fp32, what the result was multiplied by for them: [], or [..., 1].
        recipe: how they were made.
    """

    q: Tensor
    multiplier: Tensor
    recipe: FP8Recipe


class NormResult:
    """A norm's result y that can be made again, bit for bit, from what the norm keeps for its backward.

    Attributes:
        readers: how many have yet asked for it; what they need of y in the backward is made once for all of them.
    """

    __slots__ = ("_arguments", "_made", "_stream", "_version", "_waiting", "_y", "readers", "spec")

    def __init__(self, spec: NormSpec, x: Tensor, weight: Tensor | None, rstd: Tensor) -> None:
        """The norm of ``x``, with the rstd that it has kept.

        Args:
            spec: its meaning.
            x: [..., N], contiguous.
            weight: [N], or None.
            rstd: [..., 1].
        """
        self.spec = spec
        self._arguments = [None if one is None else (one.detach(), one._version) for one in (x, weight, rstd)]
        self.readers = self._waiting = 0
        self._y: Tensor | None = None
        self._version = 0
        self._made: Any = None
        self._stream: Any = None

    @property
    def device(self) -> torch.device:
        """The device of the result."""
        assert self._arguments[0] is not None
        return self._arguments[0][0].device

    def y(self) -> Tensor:
        """The result, which stays as long as this does: others may write into it."""
        if self._y is None:
            self._y = self.new_y()
            self._version = self._y._version
        return self._y

    def is_written(self) -> bool:
        """Return whether somebody has written into the result, so that its codes are no longer its own."""
        return self._y is not None and self._y._version != self._version

    def new_y(self) -> Tensor:
        """The result, as the norm has made it."""
        with torch.no_grad():
            made: Tensor = NORM_FROM_RSTD(self.spec, *self._checked_arguments())
        return made

    def columns(self, recipe: FP8Recipe) -> Quantized:
        """The result's codes with scales shared along columns."""
        casting, centered = self.spec.casting, self.spec.zero_centered
        x, weight, rstd = self._checked_arguments()
        assert x is not None
        assert rstd is not None
        return rms_norm_columns_fp8(
            x, weight, rstd, self.spec.eps, recipe=recipe, casting=casting, zero_centered=centered
        )

    def once(self, make: Callable[[], Any]) -> Any:
        """What ``make`` makes for a reader's backward, the same for all readers; freed when the last one has got it."""
        stream = current_stream()
        if self._made is None or stream != self._stream:  # what was made on another stream may not be there yet
            self._made, self._stream, self._waiting = make(), stream, self.readers
        made = self._made
        self._waiting -= 1
        if self._waiting <= 0:
            self._made = None
        return made

    def _checked_arguments(self) -> list[Tensor | None]:
        """x, weight and rstd, as they were in the forward."""
        found: list[Tensor | None] = []
        for argument in self._arguments:
            if argument is not None:
                check_version(*argument)
                if is_freed(argument[0]):
                    raise RuntimeError(
                        f"fp8: the memory of a tensor of shape {tuple(argument[0].shape)}, from which a norm is made "
                        "again, was freed between forward and backward; apply_fused_norm(model) goes without it"
                    )
            found.append(None if argument is None else argument[0])
        return found


class QuantizedActivation(Tensor):
    """A norm's result y as FP8 codes, logically y itself, without memory of its own.

    Float8 linears that were told of it read the codes. Every operator of PyTorch gets y, which is made again for it.
    """

    result: NormResult
    codes: Codes | None

    @staticmethod
    def __new__(
        cls, result: NormResult, codes: Codes | None, shape: Sequence[int], dtype: torch.dtype
    ) -> QuantizedActivation:
        """A tensor of this shape and dtype.

        Args:
            cls: this class.
            result: y.
            codes: of y; None where only y is wanted any more.
            shape: y's, or another one with the same last dimension.
            dtype: y's.
        """
        self: QuantizedActivation = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=result.device)
        self.result, self.codes = result, codes
        return self

    def like(self, codes: Codes | None, shape: Sequence[int] | None = None) -> QuantizedActivation:
        """The same y with these codes, outside of autograd."""
        return QuantizedActivation(self.result, codes, self.shape if shape is None else shape, self.dtype)

    def has_codes(self) -> bool:
        """Return whether codes are there, and nobody has written into y since they were made."""
        return self.codes is not None and self._version == 0 and not self.result.is_written()

    @property
    def exact(self) -> Tensor:
        """y, in this tensor's shape."""
        with _disable_current_modes():  # whoever traces this tensor asks for what is there
            return self.result.y().view(self.shape)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"{type(self).__name__}({self.exact!r})"

    # What traces this tensor sees y, as every operator does.
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["exact"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Tensor:
        return inner["exact"]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self = args[0] if args else None
        if isinstance(self, QuantizedActivation):
            if func in (_aten.detach.default, _aten.alias.default):
                return self.like(self.codes)
            if func is _aten.view.default and (shape := _with_rows(self.shape, args[1])) is not None:
                return self.like(self.codes, shape)
        exact, exact_named = tree_map_only(QuantizedActivation, lambda one: one.exact, (args, kwargs))
        result = func(*exact, **exact_named)
        # An operator that writes into its first argument returns that argument.
        return self if isinstance(self, QuantizedActivation) and result is exact[0] else result


def _with_rows(shape: Sequence[int], wanted: Sequence[int]) -> list[int] | None:
    """The shape that a view of rows gets; None where rows do not stay what they are."""
    if not wanted or wanted[-1] != shape[-1] or shape[-1] == 0:
        return None
    rows = 1
    for size in shape[:-1]:
        rows *= size
    known = 1
    for size in wanted[:-1]:
        known *= 1 if size == -1 else size
    if -1 in wanted[:-1] and known == 0:
        return None
    return [rows // known if size == -1 else size for size in wanted[:-1]] + [shape[-1]]


class _OnCarrier(torch.autograd.Function):
    """The activation in the place that its carrier has in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, result: NormResult, codes: Codes) -> Tensor:
        return QuantizedActivation(result, codes, carrier.shape, carrier.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None, None


def quantized_activation(result: NormResult, codes: Codes, carrier: Tensor) -> Tensor:
    """The activation that stands for a norm's result; its gradient goes where the carrier's goes."""
    return _OnCarrier.apply(carrier, result, codes)
