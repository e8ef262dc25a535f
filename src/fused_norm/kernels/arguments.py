"""Checks of a call's arguments, which raise nothing: a check returns an ``Unsupported`` with the reason, or None."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..spec import NormSpec
from .triton.memory import angles_layout

KERNEL_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
"""The dtypes that kernels take; float64 goes to the PyTorch reference."""

GATES = ("silu", "sigmoid")
"""The activations of the gate of a norm: x times the logistic function of x, and that function itself."""

Named = tuple[str, Tensor]
"""A tensor and what the operator calls it."""


class Unsupported(NamedTuple):
    """The answer to a call that kernels do not take."""

    reason: str  # why not, in words; an empty reason is not logged
    error: type[Exception] | None = None  # for wrong arguments; None if the PyTorch reference computes the call


def check_tensor(name: str, value: Any, first: Named | None = None) -> Unsupported | None:
    """Refuse anything but a dense tensor of a dtype that operators take, on the device of the first one, if given."""
    if not isinstance(value, Tensor):
        return Unsupported(f"{name} must be a tensor, not {type(value).__name__}", TypeError)
    if value.layout is not torch.strided or value.is_nested:
        layout = "nested" if value.is_nested else value.layout
        return Unsupported(f"{name} must be a dense tensor, not {layout}", TypeError)
    if value.dtype not in KERNEL_DTYPES and value.dtype != torch.float64:
        return Unsupported(f"{name} must be float32, bfloat16, float16 or float64, not {value.dtype}", TypeError)
    if first is not None and value.device != first[1].device:
        reason = f"{name} is on {value.device} and {first[0]} on {first[1].device}; move them to one device"
        return Unsupported(reason, ValueError)
    return None


@dataclass
class TensorRules:
    """The checks of tensors that follow from an operator's schema.

    Attributes:
        names: the names of the tensors; the other fields are as in ``Operator``.
        is_shared: which of them every row needs: weights, cos and sin.
    """

    names: Sequence[str]
    schema: str
    same_shape: Sequence[str]
    other_shapes: Sequence[str]
    other_rules: Sequence[str]

    def __post_init__(self) -> None:
        names = self.names
        self._is_optional = ["?" in part for part in self.schema.split(",")]
        self._is_weight = [name.endswith("weight") for name in names]
        self.is_shared = [name.endswith("weight") or name in ("cos", "sin") for name in names]
        self._rows_of = [names.index(name[0]) if name[1:] == "_weight" else 0 for name in names]  # k's of k_weight

    def weights(self, tensors: Sequence[Any]) -> list[Any]:
        """The weights among the operator's tensors."""
        return [t for t, is_weight in zip(tensors, self._is_weight, strict=True) if is_weight]

    def check(self, tensors: Sequence[Any], spec: NormSpec | None = None) -> Unsupported | None:
        """Refuse a tensor of a wrong type, layout, dtype, device or shape, and a zero-centered norm without weights."""
        first_name, first = self.names[0], tensors[0]
        for place, (name, tensor) in enumerate(zip(self.names, tensors, strict=True)):
            if name in self.other_rules or (tensor is None and self._is_optional[place]):
                continue
            if (refusal := check_tensor(name, tensor, (first_name, first))) is not None:
                return refusal
            if name in self.other_shapes:
                continue
            if self._is_weight[place]:
                rows_name, width = self.names[self._rows_of[place]], tensors[self._rows_of[place]].shape[-1]
                if tensor.dim() != 1 or tensor.shape[0] != width:
                    return Unsupported(
                        f"{name} must have shape ({width},), the last dimension of {rows_name}, not"
                        f" {tuple(tensor.shape)}",
                        ValueError,
                    )
            elif name in self.same_shape:
                if tensor.shape != first.shape:
                    return Unsupported(
                        f"{name} must have {first_name}'s shape {tuple(first.shape)}, not {tuple(tensor.shape)}; expand"
                        " it first",
                        ValueError,
                    )
            elif not self.is_shared[place] and (refusal := check_rows(name, tensor)) is not None:
                return refusal
        if spec is not None and spec.zero_centered and all(weight is None for weight in self.weights(tensors)):
            return Unsupported("zero_centered needs a weight: without one there is no gamma to centre", ValueError)
        return None


def check_rows(name: str, x: Tensor) -> Unsupported | None:
    """Refuse a tensor without rows."""
    reason = f"{name} must have at least one dimension, whose elements are a row"
    return None if x.dim() else Unsupported(reason, ValueError)


def check_choice(name: str, value: object, choices: Sequence[str]) -> Unsupported | None:
    """Refuse a value that is not among the choices."""
    if value in choices:
        return None
    return Unsupported(f"{name} must be one of {', '.join(choices)}, not {value!r}", ValueError)


def check_flag(name: str, value: object) -> Unsupported | None:
    """Refuse a value that is neither True nor False."""
    return None if isinstance(value, bool) else Unsupported(f"{name} must be True or False, not {value!r}", TypeError)


def check_eps(eps: object) -> Unsupported | None:
    """Refuse an eps that is not a finite Python number of at least 0."""
    if isinstance(eps, bool) or not isinstance(eps, Real):
        return Unsupported(f"eps must be a Python float, not {type(eps).__name__}", TypeError)
    if 0 <= float(eps) < math.inf:
        return None
    return Unsupported(f"eps must be finite and at least 0, not {eps!r}", ValueError)


def check_scale(scale: object) -> Unsupported | None:
    """Refuse a scale that is not a Python number: a tensor would need a gradient of its own."""
    if isinstance(scale, (int, float)) and not isinstance(scale, bool):
        return None
    reason = f"scale must be a Python float or int, not {type(scale).__name__}; pass x multiplied by it instead"
    return Unsupported(reason, TypeError)


def check_pair(q: Tensor, k: Tensor, single: str) -> Unsupported | None:
    """Refuse q and k with heads of two sizes; ``single`` is the operator that takes each alone."""
    if q.shape[-1] == k.shape[-1]:
        return None
    reason = f"q and k must have heads of one size, not {q.shape[-1]} and {k.shape[-1]}; call {single} for each"
    return Unsupported(reason, ValueError)


def check_angles(sides: Sequence[Named], cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> Unsupported | None:
    """Refuse cos and sin that do not fit the sides, q and perhaps k."""
    reason = None
    rotary, width = cos.shape[-1] if cos.dim() else 0, sides[0][1].shape[-1]
    flat = [(name, x) for name, x in sides if x.dim() != 4]
    if type(unsqueeze_dim) is not int or unsqueeze_dim not in (1, 2):
        reason = f"unsqueeze_dim must be 1 for heads before tokens or 2, not {unsqueeze_dim!r}"
    elif flat:
        ((name, x), *_) = flat
        reason = f"{name} must have 4 dimensions, not shape {tuple(x.shape)}; unsqueeze what is missing"
    elif sin.shape != cos.shape or sin.dtype != cos.dtype:
        reason = (
            f"sin must have cos's shape {tuple(cos.shape)} and dtype {cos.dtype}, not {tuple(sin.shape)} and"
            f" {sin.dtype}"
        )
    elif not 2 <= cos.dim() <= 4:
        reason = f"cos must have 2 to 4 dimensions, not shape {tuple(cos.shape)}"
    elif rotary % 2 or not 2 <= rotary <= width:
        reason = (
            f"cos must have an even last dimension of at most q's {width}, not {rotary}; pass the angles of both halves"
        )
    else:
        shape, _ = angles_layout(cos, unsqueeze_dim)
        for name, x in sides:
            if any(size not in (1, size_of_x) for size, size_of_x in zip(shape[:3], x.shape[:3], strict=True)):
                reason = (
                    f"cos of shape {tuple(cos.shape)}, unsqueezed at {unsqueeze_dim}, must broadcast against {name} of"
                    f" shape {tuple(x.shape)}; unsqueeze_dim is the dimension of the heads"
                )
                break
    return None if reason is None else Unsupported(reason, ValueError)


def why_other_dtype(name: str, other_name: str, tensor: Tensor, other: Tensor | None) -> str | None:
    """Return that the dtypes of two tensors differ, for which stock code has to run; None if they do not."""
    if other is None or tensor.dtype == other.dtype:
        return None
    return f"{name} is {tensor.dtype} and {other_name} {other.dtype}"
