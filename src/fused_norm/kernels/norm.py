"""RMSNorm and what one kernel computes with it: the residual add, the norm of the branch, an output per consumer.

The linears after a norm consume the same tensor. Autograd adds up their gradients in kernels of its own, and under
autocast each of them casts the tensor for itself, and its gradient back. An operator ``..._for_consumers`` writes the
tensor once, in the dtype that its consumers cast it to, and returns one alias of it per consumer, so that its backward
takes the gradients of all consumers as they are. It adds them as autograd does: in the norm's own dtype, the last
consumer's first.

Kernels, plan rules and launchers have a file of their own, ``norm_kernels``: with them this one would be too long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..spec import Casting, NormSpec
from . import reference
from .arguments import Unsupported, check_scale
from .backward import BackwardArguments, BackwardImpl
from .norm_kernels import (
    NormGradients,
    NormInputs,
    NormSaved,
    empty_norm,
    forward_plan,
    launch_norm_backward,
    launch_norm_forward,
    launch_norm_from_rstd,
)
from .norm_spec import norm_spec
from .operator import Operator, Recompute, Results
from .outputs_per_consumer import for_each_consumer, joined_grads
from .plans import Device
from .sharded import is_plain
from .triton.call import Call
from .triton.memory import memory_order, norm_dtype, out_dtype


class NormOperator(Operator):
    """RMSNorm, with or without an add before it, and with or without a norm of the branch before that.

    ``y = norm(s; weight)`` of ``s = residual + branch``; the branch is ``x * scale`` or ``norm(x; inner_weight)``. The
    schema says which of these an operator has. An only weight is called ``weight``.

    An operator with consumers has three more options: their number, the dtype that they cast y to if its own is
    float32, or None, and ``wide``: bit i says that consumer i reads y in its own dtype all the same. A call that is
    trained or has wide consumers returns y for each consumer and then s; any other, y and s.
    """

    same_shape = ("residual",)
    outputs: ClassVar[tuple[str, ...]] = ("y", "s")
    copies: ClassVar[Mapping[str, Sequence[str]]] = {
        "weight": ("x", "residual", "inner_weight"),
        "inner_weight": ("x",),
    }

    def __init__(self) -> None:
        super().__init__()
        self._adds, self._has_inner_norm = "residual" in self.tensor_names, "inner_rstd" in self.extra_saved
        self._has_outer_norm, self._has_consumers = "y" in self.outputs, "consumers" in self.options

    def check_options(self, *arguments: Any) -> Unsupported | None:
        args = self.by_name(arguments)
        if args.get("mode") is not None:
            try:
                forward_plan(int(args["x"].shape[-1]), Device(), args["mode"])  # torch.jit.trace has tensors for sizes
            except ValueError as error:
                return Unsupported(str(error), ValueError)
        return check_scale(args.get("scale", 1.0))

    def why_unlike_eager(self, *arguments: Any) -> str | None:
        """The sum of a fused add has x's memory format, PyTorch's has that of the first operand."""
        x, residual = arguments[:2]
        if not self._adds or (x.is_contiguous() and residual.is_contiguous()) or not all(map(is_plain, (x, residual))):
            return None
        return None if memory_order(x) == memory_order(residual) else "residual lies in another order in memory than x"

    def without_gradient(self, needed: Sequence[bool]) -> tuple[int, ...]:
        """The sum has no gradient to pass on if the norm's weight alone needs one."""
        is_sum_needed = any(needed[: self.gradients.index("dw")])
        return () if is_sum_needed or self.outputs != ("y", "s") else (-1,)

    def reference(self, *arguments: Any) -> Any:
        """The branch and the sum are each rounded to their dtype, and the last norm is that of the rounded sum."""
        args = self.by_name(arguments)
        spec, s, (inner_weight, weight) = args["spec"], args["x"], self._weights_of(args)
        if self._has_inner_norm:
            s = reference.rms_norm(spec, s, inner_weight)
        if self._adds:
            s = args["residual"] + (s if args.get("scale", 1.0) == 1.0 else s * args["scale"])
        if not self._has_outer_norm:
            return s
        y = reference.rms_norm(spec, s, weight)
        if self._has_consumers and not args["wide"]:
            y = reference.cast_output(y, args["dtype"])
        return (y, s) if len(self.outputs) == 2 else y

    def forward(self, call: Call, *arguments: Any, training: bool, copied: Sequence[str] = ()) -> Results:
        args = self.by_name(arguments)
        inner_weight, weight = self._weights_of(args)
        added = args.get("residual"), args.get("scale", 1.0)
        dtypes = (None, args["dtype"]) if args.get("wide") else (args.get("dtype"), None)
        last = self._has_outer_norm, *dtypes
        inputs = NormInputs(args["x"], weight, *added, self._has_inner_norm, inner_weight, *last)
        if copied and not self._has_outer_norm:
            copied = ("inner_weight",)
        outputs = empty_norm(call, args["spec"], inputs, training, copied)
        call.then(launch_norm_forward, args["spec"], inputs, outputs, args.get("mode"))
        results = outputs._asdict()
        if not self._has_outer_norm:
            results["weight_copy"] = outputs.inner_weight_copy
        return tuple([results[name] for name in self.result_names])

    def pack_outputs(self, arguments: Sequence[Any], results: Sequence[Any], *, trained: bool) -> Any:
        if not self._has_consumers:
            return super().pack_outputs(arguments, results, trained=trained)
        args = self.by_name(arguments, results)
        y, s, wide = args["y"], args["s"], args["wide"]
        if not self._adds:  # s is x, for the residual connection: its gradient meets y's in the norm's backward
            s = arguments[0]
        if wide:
            return (*for_each_consumer(args["consumers"], wide, y, args["narrow"]), s)
        return (*[y] * (args["consumers"] if trained else 1), s)

    def group_outputs(self, outputs: Any) -> list[tuple[Tensor, ...]]:
        return [outputs[:-1], outputs[-1:]] if self._has_consumers else super().group_outputs(outputs)

    def _weights_of(self, args: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
        """The weights of the branch's norm and of the sum's."""
        return (args.get("inner_weight"), args["weight"]) if self._has_outer_norm else (args["weight"], None)

    @staticmethod
    def _normalised(args: dict[str, Any]) -> tuple[Tensor, torch.dtype]:
        """The input of the last norm, and the dtype of x, from a backward's arguments."""
        s = args["s"] if "s" in args else args["x"]
        return s, args["x_dtype"] if "x_dtype" in args else args["x"].dtype

    def recompute(self, arguments: Sequence[Any], results: Sequence[Any]) -> Recompute | None:
        args = self.by_name(arguments, results)
        s, spec = args.get("s", args["x"]), args["spec"]
        # The casting "none" keeps another rstd than it uses; y in two dtypes is kept.
        if not self._has_outer_norm or spec.casting == "none" or args.get("wide"):
            return None
        return Recompute(RECOMPUTED_NORM, (s, args["weight"], args["rstd"], spec, args.get("dtype")))

    def compute_grads(self, impl: BackwardImpl, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        if self._has_consumers:
            *dys, ds = given.incoming
            args = self.backward_by_name(given._replace(incoming=(None, ds)))
            dtype = norm_dtype(args["spec"], self._normalised(args)[0].dtype, args["weight"])
            given = given._replace(incoming=(joined_grads(impl, dys[::-1], dtype), ds))
        args = self.backward_by_name(given)
        if args.get("dy") is None and args.get("ds") is not None:
            return self._gradients_of_sum(impl, args)
        # If dx and dr are identical, the same tensor is both, as PyTorch's add has it: to write it again would take
        # 25 % longer.
        alike = (
            args.get("need_dr", False)
            and args["need_dx"]
            and not self._has_inner_norm
            and args["x_dtype"] == args["residual_dtype"]
            and args["scale"] == 1.0
        )
        if alike:
            need_dx, _, *others = given.needed
            given = given._replace(needed=(need_dx, False, *others))
        grads = super().compute_grads(impl, given)
        return (grads[0], grads[0], *grads[2:]) if alike else grads

    def _gradients_of_sum(self, impl: BackwardImpl, args: dict[str, Any]) -> tuple[Tensor | None, ...]:
        """The gradients if only the sum is used: ds is passed through, as by an add."""
        ds, need_dx, need_inner = args["ds"], args["need_dx"], args.get("need_dw_inner", args["need_dw"])
        dx = dw_inner = None
        if self._has_inner_norm and (need_dx or need_inner):
            saved = args["x"], self._weights_of(args)[0], args["inner_rstd"]
            of_norm = BackwardArguments((ds,), saved, (args["spec"],), (need_dx, need_inner))
            dx, dw_inner = RMS_NORM.compute_grads(impl, of_norm)
        elif need_dx and not self._has_inner_norm:
            dx = ds if args.get("scale", 1.0) == 1.0 else ds * args["scale"]
            dx = dx.to(self._normalised(args)[1])
        dr = ds.to(args["residual_dtype"]) if args.get("need_dr") else None
        return (dx, dr, dw_inner, None)[: len(self.gradients)]

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        args = self.backward_by_name(given)
        inner_weight, weight = self._weights_of(args)
        s, x_dtype = self._normalised(args)
        dx = call.empty_rows_like(s, x_dtype) if args["need_dx"] else None
        dr = call.empty_rows_like(s, args["residual_dtype"]) if args.get("need_dr") else None
        dw = call.empty_weight_like(weight, args["need_dw"])
        dw_inner = call.empty_weight_like(inner_weight, args.get("need_dw_inner", False))
        saved = NormSaved(args["dy"], args.get("ds"), s, weight, args["rstd"], scale=args.get("scale", 1.0))
        saved = saved._replace(round_before_add=not self._adds)
        if self._has_inner_norm:
            saved = saved._replace(x=args["x"], inner_weight=inner_weight, inner_rstd=args["inner_rstd"])
        call.then(launch_norm_backward, args["spec"], saved, NormGradients(dx, dr, dw, dw_inner))
        grads = {"dx": dx, "dr": dr, "dw_inner": dw_inner, "dw": dw}
        return tuple([grads[name] for name in self.gradients])

    def reference_backward(self, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        args = self.backward_by_name(given)
        inner_weight, weight = self._weights_of(args)
        s, x_dtype = self._normalised(args)
        spec = args["spec"]
        g, dw = _reference_grads(spec, args["dy"], s, weight, args.get("ds"))
        grads = {"dx": g * args.get("scale", 1.0), "dw": dw}
        if self._has_inner_norm:
            grads["dx"], grads["dw_inner"] = _reference_grads(spec, g, args["x"], inner_weight)
        if "dr" in self.gradients:
            grads["dr"] = g.to(args["residual_dtype"])
        grads["dx"] = grads["dx"].to(x_dtype)
        return tuple([grads[name] for name in self.gradients])


class RMSNorm(NormOperator):
    """``rms_norm`` as an operator."""

    name = "rms_norm"
    tensors = "Tensor x, Tensor? weight"
    options = "NormSpec spec, str? mode"
    outputs: ClassVar[tuple[str, ...]] = ("y",)
    extra_saved = ("rstd",)
    saved = "Tensor x, Tensor? weight, Tensor rstd"
    saved_scalars = "NormSpec spec"
    gradients = ("dx", "dw")


class AddRMSNorm(NormOperator):
    """``add_rms_norm`` as an operator."""

    name = "add_rms_norm"
    tensors = "Tensor x, Tensor residual, Tensor? weight"
    options = "NormSpec spec, str? mode, float scale"
    extra_saved = ("rstd",)
    saved = "Tensor s, Tensor? weight, Tensor rstd"
    saved_scalars = "NormSpec spec, ScalarType x_dtype, ScalarType residual_dtype, float scale"
    gradients = ("dx", "dr", "dw")


class NormAdd(NormOperator):
    """``norm_add`` as an operator, the backward of which is that of ``rms_norm``."""

    name = "norm_add"
    tensors = "Tensor x, Tensor residual, Tensor? weight"
    options = "NormSpec spec"
    outputs = ("s",)
    extra_saved = ("inner_rstd",)
    saved = "Tensor x, Tensor? weight, Tensor inner_rstd"
    saved_scalars = "NormSpec spec, ScalarType residual_dtype"
    gradients = ("dx", "dr", "dw")
    copies: ClassVar[Mapping[str, Sequence[str]]] = {"weight": ("x",)}

    backward = Operator.backward


class NormAddNorm(NormOperator):
    """``norm_add_norm`` as an operator."""

    name = "norm_add_norm"
    tensors = "Tensor x, Tensor residual, Tensor? inner_weight, Tensor? weight"
    options = "NormSpec spec"
    extra_saved = ("inner_rstd", "rstd")
    saved = "Tensor s, Tensor x, Tensor? inner_weight, Tensor? weight, Tensor inner_rstd, Tensor rstd"
    saved_scalars = "NormSpec spec, ScalarType residual_dtype"
    gradients = ("dx", "dr", "dw_inner", "dw")


class RMSNormForConsumers(RMSNorm):
    """``rms_norm`` with consumers, and x again for the residual connection: both gradients meet in the backward."""

    name = "rms_norm_for_consumers"
    plain_name = "rms_norm"
    options = "NormSpec spec, int consumers, ScalarType? dtype, int wide"
    further_results = ("narrow",)
    outputs = ("y", "s")


class AddRMSNormForConsumers(AddRMSNorm):
    """``add_rms_norm`` with consumers."""

    name = "add_rms_norm_for_consumers"
    plain_name = "add_rms_norm"
    options = "NormSpec spec, float scale, int consumers, ScalarType? dtype, int wide"
    further_results = ("narrow",)


class NormAddNormForConsumers(NormAddNorm):
    """``norm_add_norm`` with consumers."""

    name = "norm_add_norm_for_consumers"
    plain_name = "norm_add_norm"
    options = "NormSpec spec, int consumers, ScalarType? dtype, int wide"
    further_results = ("narrow",)


class RecomputedNorm(Operator):
    """The output of a norm computed again, bit for bit, from the rstd of the first time; it has no gradients."""

    name = "recomputed_norm"
    tensors = "Tensor x, Tensor? weight, Tensor rstd"
    options = "NormSpec spec, ScalarType? dtype"
    outputs: ClassVar[tuple[str, ...]] = ("y",)
    saved = ""
    gradients = ()

    def check_options(self, *arguments: Any) -> Unsupported | None:
        x, _, rstd, spec, _ = arguments
        if rstd.shape != (*x.shape[:-1], 1):
            return Unsupported(f"rstd has shape {tuple(rstd.shape)}, and x {tuple(x.shape)}", ValueError)
        if rstd.dtype != torch.float32:
            return Unsupported(f"rstd must be float32, not {rstd.dtype}", TypeError)
        if spec.casting == "none":
            return Unsupported("under casting 'none' the forward uses another rstd than it keeps", ValueError)
        return None

    def reference(self, *arguments: Any) -> Any:
        x, weight, _, spec, dtype = arguments
        return reference.cast_output(reference.rms_norm(spec, x, weight), dtype)

    def forward(self, call: Call, *arguments: Any, training: bool) -> Results:
        x, weight, rstd, spec, dtype = arguments
        y = call.empty_rows_like(x, out_dtype(norm_dtype(spec, x.dtype, weight), dtype))
        call.then(launch_norm_from_rstd, spec, x, weight, rstd, y)
        return (y,)


RMS_NORM, ADD_RMS_NORM, NORM_ADD, NORM_ADD_NORM = RMSNorm(), AddRMSNorm(), NormAdd(), NormAddNorm()
RMS_NORM_FOR_CONSUMERS, ADD_RMS_NORM_FOR_CONSUMERS = RMSNormForConsumers(), AddRMSNormForConsumers()
NORM_ADD_NORM_FOR_CONSUMERS, RECOMPUTED_NORM = NormAddNormForConsumers(), RecomputedNorm()


def _reference_grads(
    spec: NormSpec, dy: Tensor, x: Tensor, weight: Tensor | None, ds: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The gradients ``(dx, dw)`` of ``reference.rms_norm``, which can be differentiated again.

    dx is not yet rounded; ``ds`` is added to it. dw has the weight's dtype.
    """
    dx, dw = reference.gradients_of(
        partial(reference.rms_norm, spec), (reference.widened(x), weight), (dy,), (True, weight is not None)
    )
    assert dx is not None
    return dx if ds is None else dx + ds.to(dx.dtype), dw


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    casting: Casting = "llama",
    zero_centered: bool = False,
    mode: str | None = None,
) -> Tensor:
    """RMSNorm over the last dimension (Zhang and Sennrich 2019, arXiv 1910.07467).

    ``y = x * rsqrt(mean(x^2) + eps) * gamma``, gamma being ``weight`` or, zero-centered, ``1 + weight``.

    Args:
        x: [..., N], float32, bfloat16 or float16; float64 is computed by the PyTorch reference. Any strides; evenly
            spaced rows are read where they are, others are copied first.
        weight: [N] of any of these dtypes, or None.
        eps: added to the mean of squares.
        casting: the rounding points and the output's dtype: one of ``fused_norm.spec.CASTINGS``, see ``NormSpec``.
        zero_centered: gamma is ``1 + weight``; rounded to the weight's dtype except under ``gemma``.
        mode: how the forward kernel goes through the rows, one of ``kernels.MODES``; None takes the fastest.

    Returns:
        y, of x's shape and memory order. Its dtype is x's under ``gemma`` and ``rounded_gamma``, the weight's under
        ``weight_dtype``, else what x and weight promote to.

    Raises:
        TypeError: for anything but a dense tensor of floating point, an eps that is not a Python number, and a
            zero_centered that is not a bool.
        ValueError: for a weight of another width or device, none that could be zero-centered, an unknown casting, an
            eps that is negative or not finite, or a mode that cannot hold a row this wide.
    """
    return RMS_NORM.checked(x, weight, norm_spec(casting, zero_centered, eps), mode)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    casting: Casting = "llama",
    zero_centered: bool = False,
    mode: str | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The residual add and the RMSNorm of its sum, the sum read and written once.

    ``s = residual + x * scale``, the product rounded to x's dtype and the sum to its own;
    ``y = s * rsqrt(mean(s^2) + eps) * gamma`` of that rounded sum.

    Args:
        x: [..., N], the branch; dtypes and strides as in ``rms_norm``.
        residual: x's shape and device; its dtype may differ.
        weight: [N], or None.
        eps: as in ``rms_norm``, for the norm of the sum; so are the next two.
        casting: rounding points and output dtype.
        zero_centered: gamma is ``1 + weight``.
        mode: as in ``rms_norm``.
        scale: a Python number that the branch is multiplied by, such as Granite's ``residual_multiplier``.

    Returns:
        ``(y, s)``: the norm and the new residual. s has the dtype that x and residual promote to; y follows from it.
        Both have x's shape and memory order. The gradients with respect to x and residual may be one tensor, as those
        of PyTorch's add are.

    Raises:
        TypeError: for a scale that is not a Python number, and as ``rms_norm`` does.
        ValueError: for a residual of another shape or device, and as ``rms_norm`` does.
    """
    return ADD_RMS_NORM.checked(x, residual, weight, norm_spec(casting, zero_centered, eps), mode, scale)


def norm_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    casting: Casting = "llama",
    zero_centered: bool = False,
) -> Tensor:
    """A residual plus the RMSNorm of its branch, what the norm returns never written.

    ``s = residual + norm(x)``, the norm rounded to its own dtype first and the sum to its dtype after it.

    Args:
        x: [..., N], the branch; dtypes and strides as in ``rms_norm``.
        residual: x's shape and device; its dtype may differ.
        weight: [N], or None.
        eps: as in ``rms_norm``; so are the next two.
        casting: rounding points and the dtype of the norm.
        zero_centered: gamma is ``1 + weight``.

    Returns:
        s, the new residual, of x's shape and memory order and the dtype that the norm and residual promote to. The
        residual's gradient is the one that arrives.

    Raises:
        TypeError: as ``rms_norm`` does.
        ValueError: for a residual of another shape or device, and as ``rms_norm`` does.
    """
    return NORM_ADD.checked(x, residual, weight, norm_spec(casting, zero_centered, eps))


def norm_add_norm(
    x: Tensor,
    residual: Tensor,
    inner_weight: Tensor | None,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    casting: Casting = "llama",
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """A residual plus the RMSNorm of its branch, and the RMSNorm of that sum, in one pass (Gemma 2's sandwich).

    ``s = residual + norm(x; inner_weight)``, the norm rounded to its own dtype first and the sum to its dtype after
    it; ``y = norm(s; weight)`` of that rounded sum.

    Args:
        x: [..., N], the branch; dtypes and strides as in ``rms_norm``.
        residual: x's shape and device; its dtype may differ.
        inner_weight: [N], or None: the norm of the branch's.
        weight: [N], or None: the norm of the sum's.
        eps: as in ``rms_norm``, for both norms; so are the next two.
        casting: rounding points and the dtype of each norm.
        zero_centered: gamma is ``1 + weight``.

    Returns:
        ``(y, s)``: the norm and the new residual. s has the dtype that the branch's norm and residual promote to; y
        follows from it. Both have x's shape and memory order.

    Raises:
        TypeError: as ``rms_norm`` does.
        ValueError: for a residual of another shape or device, and as ``rms_norm`` does.
    """
    return NORM_ADD_NORM.checked(x, residual, inner_weight, weight, norm_spec(casting, zero_centered, eps))
