"""RMSNorm, and what it has in common with the operators of RMSNorm and residual add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..spec import Casting, NormSpec
from . import reference
from .arguments import Refusal, other_order, wrong_mode, wrong_scale
from .operator import BackwardCall, Operator, Recompute, Route, Tensors, norm_spec
from .recomputed_norm import norm_recompute
from .triton.memory import empty_rows_like, empty_weight_grad, norm_reads_copy
from .triton.norm_backward import NormGradients, NormSaved, launch_norm_backward
from .triton.norm_forward import NormInputs, empty_norm, launch_norm_forward


class NormOperator(Operator):
    """RMSNorm, with or without an add in front of it, and with or without a norm of the branch in front of that.

    ``y = norm(s; weight)`` of ``s = residual + branch``; the branch is ``x * scale`` or ``norm(x; inner_weight)``. What
    of this an operator has, its schema tells.
    """

    same_shape = ("residual",)
    copies: ClassVar[Mapping[str, Sequence[str]]] = {
        "weight": ("x", "residual", "inner_weight"),
        "inner_weight": ("x",),
    }
    inner: ClassVar[bool] = False
    """The branch is normalised."""

    def wrong(self, spec: NormSpec, *arguments: Any) -> Refusal | None:
        given = self.by_name(arguments)
        return wrong_mode(given["x"], given.get("mode")) or wrong_scale(given.get("scale", 1.0))

    def unlike_stock(self, spec: NormSpec, *arguments: Any) -> str | None:
        x, residual, *_ = arguments
        return other_order(x, residual) if "residual" in self.tensor_names else None

    def reads_copy(self, spec: NormSpec, weight: Tensor, tensors: Tensors) -> bool:
        return norm_reads_copy(spec, weight)

    def without_gradient(self, needed: Sequence[bool]) -> tuple[int, ...]:
        """The sum has no gradient to pass on if the norm's weight alone needs one."""
        is_sum_needed = any(needed[: self.gradients.index("dw")])
        return () if is_sum_needed or self.outputs != ("y", "s") else (-1,)

    def forward(
        self, spec: NormSpec, *arguments: Any, training: bool, launch: bool = True, copied: Sequence[str] = ()
    ) -> tuple[Any, ...]:
        given = self.by_name(arguments)
        inner_weight, weight = self._weights_of(given)
        added = given.get("residual"), given.get("scale", 1.0)
        last = "y" in self.outputs, given.get("dtype")
        inputs = NormInputs(given["x"], weight, *added, self.inner, inner_weight, *last)
        if "y" not in self.outputs and copied:
            copied = ("inner_weight",)
        outputs = empty_norm(spec, inputs, training, copied)
        if launch:
            launch_norm_forward(spec, inputs, outputs, given.get("mode"))
        found = outputs._asdict()
        if "y" not in self.outputs:
            found["weight_copy"] = outputs.inner_weight_copy
        return tuple([found[name] for name in self.result_names])

    def _weights_of(self, given: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
        """The weights of the branch's norm and of the sum's; an only one is called ``weight``."""
        if "y" not in self.outputs:
            return given["weight"], None
        return given.get("inner_weight"), given["weight"]

    @staticmethod
    def _normalised(given: dict[str, Any]) -> tuple[Tensor, torch.dtype]:
        """What was normalised last, and the dtype of x, of a backward's arguments."""
        s = given["s"] if "s" in given else given["x"]
        return s, given["x_dtype"] if "x_dtype" in given else given["x"].dtype

    def recompute(self, spec: NormSpec, arguments: Sequence[Any], results: Sequence[Any]) -> Recompute | None:
        if "y" not in self.outputs:
            return None
        known = self.by_name(arguments, results)
        return norm_recompute(spec, known.get("s", known["x"]), known["weight"], known["rstd"], known.get("dtype"))

    def gradients_by(self, route: Route, spec: NormSpec, call: BackwardCall) -> tuple[Tensor | None, ...]:
        given = self.backward_by_name(call)
        if given.get("dy") is None and given.get("ds") is not None:
            return self._gradients_of_sum(route, spec, call)
        # As PyTorch's own add, one gradient for both where they are alike: a second store costs a quarter of the time.
        alike = (
            given.get("need_dr", False)
            and given["need_dx"]
            and not self.inner
            and given["x_dtype"] == given["residual_dtype"]
            and given["scale"] == 1.0
        )
        if alike:
            need_dx, _, *others = call.needed
            call = call._replace(needed=(need_dx, False, *others))
        found = super().gradients_by(route, spec, call)
        return (found[0], found[0], *found[2:]) if alike else found

    def _gradients_of_sum(self, route: Route, spec: NormSpec, call: BackwardCall) -> tuple[Tensor | None, ...]:
        """The gradients where the norm of the sum is unused, or is not there: the sum's passes on as an add does it."""
        given = self.backward_by_name(call)
        ds, need_dx, need_inner = given["ds"], given["need_dx"], self.inner and call.needed[2]
        dx = dinner = None
        if self.inner and (need_dx or need_inner):
            saved = given["x"], self._weights_of(given)[0], given["inner_rstd"]
            norm_call = BackwardCall((ds,), saved, (), (need_dx, need_inner))
            dx, dinner = RMS_NORM.gradients_by(route, spec, norm_call)
        elif need_dx and not self.inner:
            dx = ds if given.get("scale", 1.0) == 1.0 else ds * given["scale"]
            dx = dx.to(self._normalised(given)[1])
        dr = ds.to(given["residual_dtype"]) if given.get("need_dr") else None
        return (dx, dr, dinner, None)[: len(self.gradients)]

    def backward(self, spec: NormSpec, call: BackwardCall, *, launch: bool = True) -> tuple[Tensor | None, ...]:
        given = self.backward_by_name(call)
        inner_weight, weight = self._weights_of(given)
        s, x_dtype = self._normalised(given)
        dx = empty_rows_like(s, x_dtype) if given["need_dx"] else None
        dr = empty_rows_like(s, given["residual_dtype"]) if given.get("need_dr") else None
        dw = empty_weight_grad(weight, given["need_dw"])
        dinner = empty_weight_grad(inner_weight, given.get("need_dinner", False))
        if launch:
            saved = NormSaved(given["dy"], given.get("ds"), s, weight, given["rstd"], scale=given.get("scale", 1.0))
            saved = saved._replace(apart="residual" not in self.tensor_names)
            if self.inner:
                saved = saved._replace(x=given["x"], inner_weight=inner_weight, inner_rstd=given["inner_rstd"])
            launch_norm_backward(spec, saved, NormGradients(dx, dr, dw, dinner))
        found = {"dx": dx, "dr": dr, "dinner": dinner, "dw": dw}
        return tuple([found[name] for name in self.gradients])

    def reference_backward(self, spec: NormSpec, call: BackwardCall) -> tuple[Tensor | None, ...]:
        given = self.backward_by_name(call)
        inner_weight, weight = self._weights_of(given)
        s, x_dtype = self._normalised(given)
        g, dw = reference.rms_norm_backward(spec, given["dy"], s, weight, given.get("ds"))
        found = {"dx": g * given.get("scale", 1.0), "dw": dw}
        if self.inner:
            found["dx"], found["dinner"] = reference.rms_norm_backward(spec, g, given["x"], inner_weight)
        if "dr" in self.gradients:
            found["dr"] = g.to(given["residual_dtype"])
        found["dx"] = found["dx"].to(x_dtype)
        return tuple([found[name] for name in self.gradients])


class RMSNorm(NormOperator):
    """``rms_norm`` as an operator."""

    name = "rms_norm"
    tensors = "Tensor x, Tensor? weight"
    options = "str? mode"
    outputs = ("y",)
    kept = ("rstd",)
    saved = "Tensor x, Tensor? weight, Tensor rstd"
    gradients = ("dx", "dw")

    def reference(self, spec: NormSpec, *arguments: Any) -> Tensor:
        x, weight, _ = arguments
        return reference.rms_norm(spec, x, weight)


RMS_NORM = RMSNorm()


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
        mode: how the forward kernel goes through the rows, one of ``kernels.MODES``; None takes the fastest known.

    Returns:
        y, of x's shape and memory order. Its dtype is x's under ``gemma`` and ``rounded_gamma``, the weight's under
        ``weight_dtype``, else what x and weight promote to.

    Raises:
        TypeError: for anything but a dense tensor of floating point, an eps that is no Python number, and a
            zero_centered that is no truth value.
        ValueError: for a weight of another width or device, none that could be zero-centered, an unknown casting, an
            eps that is negative or not finite, or a mode that cannot hold a row this wide.
    """
    return RMS_NORM.checked(norm_spec(casting, zero_centered, eps), x, weight, mode)
