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


class Remake:
    """How a norm's result is made again, bit for bit, from what the norm keeps for its backward; it holds no tensors.

    Those who read the result share it: what they need in the backward is made once for all of them.

    Attributes:
        spec: the norm's meaning.
        readers: how many have read the result.
    """

    __slots__ = ("_made", "_stream", "_waiting", "readers", "spec")

    def __init__(self, spec: NormSpec) -> None:
        self.spec = spec
        self.readers = self._waiting = 0
        self._made: Any = None
        self._stream: Any = None

    def y(self, x: Tensor, weight: Tensor | None, rstd: Tensor) -> Tensor:
        """The result, from the norm's input, weight and rstd."""
        with torch.no_grad():
            made: Tensor = NORM_FROM_RSTD(self.spec, *_there(x, weight, rstd))
        return made

    def columns(self, recipe: FP8Recipe, x: Tensor, weight: Tensor | None, rstd: Tensor) -> Quantized:
        """The result's codes with scales shared along columns."""
        _there(x, weight, rstd)
        casting, centered = self.spec.casting, self.spec.zero_centered
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


def _there(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors, none of which has lost its memory."""
    for tensor in tensors:
        if tensor is not None and is_freed(tensor):
            raise RuntimeError(
                f"fp8: the memory of a tensor of shape {tuple(tensor.shape)}, from which a norm is made again, was "
                "freed between forward and backward; apply_fused_norm(model) goes without it"
            )
    return tensors


class NormResult:
    """A norm's result y, which is there only if somebody has asked for it.

    Attributes:
        remake: makes y of ``kept``.
        kept: what the norm keeps for its backward: its input, outside of autograd, its weight and rstd.
    """

    __slots__ = ("_version", "_versions", "_y", "kept", "remake")

    def __init__(self, remake: Remake, kept: tuple[Tensor | None, ...]) -> None:
        self.remake, self.kept = remake, kept
        self._versions = [None if one is None else one._version for one in kept]
        self._y: Tensor | None = None
        self._version = 0

    def y(self) -> Tensor:
        """The result, which stays as long as this does: others may write into it."""
        if self._y is None:
            for one, version in zip(self.kept, self._versions, strict=True):
                if one is not None and version is not None:
                    check_version(one, version)
            self._y = self.remake.y(*self.kept)  # type: ignore[arg-type]
            self._version = self._y._version
        return self._y

    def is_written(self) -> bool:
        """Return whether somebody has written into the result, so that its codes are no longer its own."""
        return self._y is not None and self._y._version != self._version


class QuantizedActivation(Tensor):
    """A norm's result y as FP8 codes, logically y itself, without memory of its own.

    Float8 linears that were told of it read the codes. Every operator of PyTorch gets y, which is made again for it.
    """

    result: NormResult
    codes: Codes

    @staticmethod
    def __new__(cls, result: NormResult, codes: Codes, shape: Sequence[int], dtype: torch.dtype) -> QuantizedActivation:
        """A tensor of this shape and dtype.

        Args:
            cls: this class.
            result: y.
            codes: of y.
            shape: y's, or another one with the same last dimension.
            dtype: y's.
        """
        self: QuantizedActivation = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.q.device)
        self.result, self.codes = result, codes
        return self

    def in_shape(self, shape: Sequence[int]) -> QuantizedActivation:
        """The same y in another shape, outside of autograd."""
        return QuantizedActivation(self.result, self.codes, shape, self.dtype)

    def has_codes(self) -> bool:
        """Return whether nobody has written into y since its codes were made."""
        return self._version == 0 and not self.result.is_written()

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
                return self.in_shape(self.shape)
            if func is _aten.view.default and (shape := _with_rows(self.shape, args[1])) is not None:
                return self.in_shape(shape)
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
