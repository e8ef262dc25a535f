"""The faults that are planted in fused operators and blocks, one at a time, to see that the verdict turns red.

Each stands for a mistake that kernels or patchers have made. Most change a call in one of a few ways: an argument that
is left out, truncated, shifted or swapped, a cast that is missing or in another place, a result that is slightly off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fused_norm.kernels import reference
from fused_norm.kernels.causal_conv1d import CAUSAL_CONV1D
from fused_norm.kernels.experts import EXPERT_BIAS, EXPERT_GATE, EXPERT_PERMUTE, EXPERT_UNPERMUTE
from fused_norm.kernels.fp8.operators import NORM_FP8
from fused_norm.kernels.gated_rms_norm import GATED_RMS_NORM
from fused_norm.kernels.glu import GLU, GLU_FOR_CONSUMERS
from fused_norm.kernels.linear_4bit import LINEAR_4BIT, LORA_LINEAR_4BIT, LORA_SUMMANDS_4BIT
from fused_norm.kernels.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from fused_norm.kernels.lora_add import LORA_ADD
from fused_norm.kernels.lora_linear import LORA_LINEAR
from fused_norm.kernels.norm import (
    ADD_RMS_NORM,
    ADD_RMS_NORM_FOR_CONSUMERS,
    NORM_ADD,
    NORM_ADD_NORM,
    NORM_ADD_NORM_FOR_CONSUMERS,
    RMS_NORM,
    RMS_NORM_FOR_CONSUMERS,
)
from fused_norm.kernels.operator import Recompute
from fused_norm.kernels.qk_norm_rope import QK_NORM, ROPE
from fused_norm.kernels.triton.memory import norm_dtype
from fused_norm.patcher import adapters, fused_block, fused_classes, linear_inputs, losses, recompute, recompute_linears
from fused_norm.patcher.adapters import AdapterInput, FusedAdapter
from fused_norm.patcher.fused_block import FusedBlock
from fused_norm.patcher.fused_norm_module import is_disabled
from fused_norm.patcher.lazy_logits import LazyLogits
from fused_norm.patcher.losses import LossCall
from fused_norm.patcher.recompute import _Recomputable
from fused_norm.patcher.recompute_linears import LinearOutputs

from .planting import (
    WEIGHTS,
    Backward,
    Forward,
    Losses,
    Planting,
    Results,
    falls_back,
    in_backward,
    in_compiled_backward,
    in_forward,
    in_head,
    in_losses,
    left_stock,
    linear_cross_entropy,
    logits_of_the_latest_batch,
    never_answers,
    replaced_by,
    with_changed_table,
)

_NORMED = (RMS_NORM, ADD_RMS_NORM, NORM_ADD, NORM_ADD_NORM, QK_NORM, GATED_RMS_NORM)
_OF_EXPERTS = (EXPERT_BIAS, EXPERT_GATE, EXPERT_PERMUTE, EXPERT_UNPERMUTE)
_IN_MODELS = (*_NORMED, ROPE, GLU, CAUSAL_CONV1D, *_OF_EXPERTS)
OF_ADAPTERS = (LORA_ADD, LORA_LINEAR, LORA_LINEAR_4BIT)
"""The operators of adapters."""
_EVERY = (*_IN_MODELS, LINEAR_4BIT, *OF_ADAPTERS)
OF_ROWS = tuple(operator for operator in _EVERY if operator is not EXPERT_BIAS)
"""Operators whose first tensor has the rows of a batch, and may hold NaN; EXPERT_BIAS begins with a parameter."""
_IN_4_BITS = (LINEAR_4BIT, LORA_LINEAR_4BIT)
_WITH_LINEARS = (LORA_LINEAR, LORA_LINEAR_4BIT)
_WITH_RANKS = (*OF_ADAPTERS, LORA_SUMMANDS_4BIT)
_OF_QLORA = (LORA_LINEAR_4BIT, LORA_SUMMANDS_4BIT, GLU_FOR_CONSUMERS)
_NORM_OF_SUM = (ADD_RMS_NORM, NORM_ADD_NORM)
_ROTATED = (QK_NORM, ROPE)
_SUMMED = (ADD_RMS_NORM, NORM_ADD, NORM_ADD_NORM)
# norm_add has the backward of rms_norm.
_WITH_WEIGHTS = (RMS_NORM, ADD_RMS_NORM, NORM_ADD_NORM, QK_NORM, GATED_RMS_NORM, *OF_ADAPTERS)
_EVERY_BACKWARD = tuple(
    op for op in (*_WITH_WEIGHTS, ROPE, GLU, CAUSAL_CONV1D, *_OF_EXPERTS, LINEAR_4BIT) if op in OF_ROWS
)
_FOR_CONSUMERS = (RMS_NORM_FOR_CONSUMERS, ADD_RMS_NORM_FOR_CONSUMERS, NORM_ADD_NORM_FOR_CONSUMERS)
_INPUTS = ("dx", "dr", "dq", "dk", "dgate", "dup")
_16_BITS = "nothing is rounded in fp32"
ROUNDINGS = "it changes no rounding that is compared: its dtypes leave none, or this is a GPU"


@dataclass(frozen=True)
class Fault:
    """A fault that can be planted.

    Attributes:
        name: its key in ``FAULTS``.
        planted: plants it for the length of a ``with``.
        hidden: why it may change no number in some models and precisions; empty if it always changes some.
        where: what runs it: ``eager`` for single calls of operators, ``sites`` for whole models that run eagerly,
            ``consumers`` for a step of a model whose norms know their consumers, ``fp8`` for operators that write FP8
            codes, which no model calls, or the name of another execution of the suite.
    """

    name: str
    planted: Planting
    hidden: str = ""
    where: str = "eager"

    @property
    def operator(self) -> str:
        """The name of the operator that goes wrong, or of the operator that it is a form of."""
        return self.name.partition("-")[0].removesuffix("_for_consumers")


# ---- Faults of FP8 codes ----


def _codes_by(call: Forward, multiplier: Tensor, *, saturated: bool = True) -> list[Tensor | None]:
    """Return the results, with codes of the norm's result by this multiplier."""
    results = call.results()
    q = results[0]
    assert q is not None
    top, scaled = torch.finfo(q.dtype).max, _normed(call) * multiplier
    beyond = scaled.clamp(-top, top) if saturated else scaled.where(scaled.abs() <= top, torch.nan)
    results[0] = beyond.to(q.dtype)
    return results


def _normed(call: Forward) -> Tensor:
    """Return the norm's result y before it is cast, in float32."""
    x, residual, weight, _, _, spec, scale, _ = call.arguments
    if residual is None:
        y = RMS_NORM.forward(x, weight, spec, None, training=False)[0]
    else:
        y = ADD_RMS_NORM.forward(x, residual, weight, spec, None, scale, training=False)[0]
    assert isinstance(y, Tensor)
    return y.float()


def _scales_of_columns(call: Forward) -> Results:
    """Write codes with a scale for each column, which are read with one for each row."""
    largest = _normed(call).abs().flatten(0, -2).amax(0).clamp(min=1e-12)
    return _codes_by(call, torch.exp2((torch.finfo(torch.float8_e4m3fn).max / largest).log2().floor()))


def _scale_of_the_first_call(call: Forward) -> Results:
    scale = call.results()[1]
    assert scale is not None
    first = call.memory.setdefault("scale", scale.clone())
    results = _codes_by(call, first.reciprocal())
    results[1] = first.clone()
    return results


def _not_saturated(call: Forward) -> Results:
    """Halve the scale, so that values beyond the largest code become NaN."""
    scale = call.results()[1]
    assert scale is not None
    results = _codes_by(call, 2 * scale.reciprocal(), saturated=False)
    results[1] = scale / 2
    return results


# ---- Faults of forwards ----


def _with_spec(change: Callable[[Any], dict[str, Any]]) -> Callable[[Forward], Results]:
    """Return the results of a norm with a changed spec."""

    def wrong(call: Forward) -> Results:
        return call.results(spec=replace(call["spec"], **change(call["spec"])))

    return wrong


def _with_angles(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[Forward], Results]:
    """Return the results of a rotation by changed angles, if there is one."""

    def wrong(call: Forward) -> Results:
        cos, sin = call["cos"], call["sin"]
        if cos is None:
            return call.results()
        return call.results(**dict(zip(("cos", "sin"), change(cos, sin), strict=True)))

    return wrong


def _edited(change: Callable[[Tensor], Tensor], *names: str) -> Callable[[Any], Results]:
    """Change the results, or the outputs or gradients with these names."""
    return lambda call: call.edited(change, *names)


def _too_large(call: Forward) -> Results:
    return call.edited(lambda y: y * 1.003, call.operator.outputs[0])


def _last_row_copied(y: Tensor) -> Tensor:
    wrong = y.clone()
    if y.dim() < 3:
        wrong[-1:] = y[-2:-1]
    else:
        wrong[-1:, ..., -1:, :] = y[-1:, ..., -2:-1, :]
    return wrong


def _rows_of_the_first_call(call: Forward) -> Results:
    first = call.memory.setdefault(call.arguments[0].shape[-1:], len(call.arguments[0]))
    if len(call.arguments[0]) >= first:
        return call.results()
    return call.edited(lambda y: torch.where(torch.arange(y.shape[-2], device=y.device)[:, None] > 0, y, 0.0))


def _narrow(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype) if x.dtype == torch.float32 else x


def _writes_over_its_branch(call: Forward) -> Results:
    results, x = call.results(), call["x"]
    with torch.no_grad():
        (call.arguments[0] if x is None else x).detach().mul_(0.5)
    return results


def _of_a_neighbour(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def late(angles: Tensor) -> Tensor:
        return torch.cat((angles[..., :32, :], angles[..., 31:-1, :]), dim=-2) if angles.shape[-2] > 32 else angles

    return late(cos), late(sin)


_rotated_backwards = _with_angles(lambda cos, sin: (cos, -sin))


def _half_rotated_backwards(call: Forward) -> Results:
    """Add the partner of the first half instead of subtracting it."""
    half = call["sin"].shape[-1] // 2

    def mixed(right: Tensor | None, wrong: Tensor | None) -> Tensor | None:
        if right is None or wrong is None:
            return right
        return torch.where(torch.arange(right.shape[-1], device=right.device) < half, wrong, right)

    return [mixed(*pair) for pair in zip(call.results(), _rotated_backwards(call), strict=True)]


def _end_lost(y: Tensor) -> Tensor:
    """Leave a few numbers at the end unwritten if the size is a multiple of 1024."""
    return y if y.numel() % 1024 else torch.cat((y.flatten()[:-32], y.new_zeros(32))).view(y.shape)


def _last_of_an_even_number_lost(y: Tensor) -> Tensor:
    return y if y.shape[-2] % 2 else torch.cat((y[..., :-1, :], torch.zeros_like(y[..., -1:, :])), dim=-2)


def _too_large_in_a_backward(call: Forward) -> Results:
    return _too_large(call) if torch._C._current_graph_task_id() != -1 else call.results()


def _factors_cut_off(call: Forward) -> Results:
    dtype = call["x"].dtype
    factors = {name: call[name] for name in "ab" if call[name].dtype != dtype}
    return call.results(**{name: _cut_off(factor).to(dtype) for name, factor in factors.items()})


def _products_unrounded(call: Forward) -> Results:
    x = call["x"]
    return call.results(x=x.float(), a=call["a"].to(x.dtype), b=call["b"].to(x.dtype))


def _convolution_unrounded(call: Forward) -> Results:
    wide = {name: None if call[name] is None else call[name].float() for name in ("x", "weight", "bias")}
    return call.results(**wide)


def _sum_unrounded(call: Forward) -> Results:
    return call.results("y", x=call["x"].float(), residual=call["residual"].float())


def _wrong_activation(call: Forward) -> Results:
    return call.results(activation="gelu" if call["activation"] == "gelu_tanh" else "gelu_tanh")


def _second_summand_lost(call: Forward) -> Results:
    added = call["gate_added"]
    return call.results() if added is None else call.results(gate_added=torch.zeros_like(added))


def _copy_cut_off(call: Forward) -> Results:
    results = call.results()
    arguments = call.operator.by_name(call.arguments) | {"dtype": None, "wide": 0}
    exact = call.right(*arguments.values(), training=call.training)[0]
    assert exact is not None
    for place in (0, -1):  # y, and y in 16 bits as well
        copy = results[place]
        if copy is not None and copy.dtype.itemsize < exact.dtype.itemsize:
            results[place] = _cut_off(exact).to(copy.dtype)
    return results


def _cut_off(x: Tensor) -> Tensor:
    """Truncate the numbers of an fp32 tensor to 16 bits."""
    return (x.view(torch.int32) & -(2**16)).view(torch.float32)


# ---- Faults of backwards ----


def _gradients_swapped(call: Backward) -> Results:
    dgate, dup = call.results()
    if dgate is not None and call["up"] is None:
        return torch.cat(dgate.chunk(2, dim=-1)[::-1], dim=-1), None
    return (dup, dgate) if dgate is not None and dup is not None else (dgate, dup)


def _slope_without_its_square(call: Backward) -> Results:
    """Differentiate the tanh GELU as if the inner polynomial were linear."""
    gradients, up = call.results(), call["up"]
    if call["activation"] != "gelu_tanh" or up is None or gradients[0] is None:
        return gradients
    x, root = call["gate"].float(), (2 / torch.pi) ** 0.5
    t = torch.tanh(root * (x + 0.044715 * x**3))
    slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root
    gradients[0] = (call["dy"].float() * up.float() * slope).to(gradients[0].dtype)
    return gradients


def _half_nearer_zero(x: Tensor) -> Tensor:
    """Return 16-bit numbers as if fp32 were truncated: half of them move to the neighbour nearer to zero."""
    if x.dtype == torch.float32:
        return x
    bits = x.contiguous().view(torch.int16)
    cut = (torch.arange(x.numel(), device=x.device) % 2).view(x.shape).to(torch.int16)
    return torch.where(x == 0, bits, bits - cut).view(x.dtype)


def _dx_where_the_weight_is_frozen(call: Backward) -> Results:
    is_trained = any(call[f"need_{name}"] for name in WEIGHTS)
    return call.edited(lambda dx: dx if is_trained else dx * 0.99, *_INPUTS)


def _without_rows(last: Callable[[int], int]) -> Callable[[Backward], Results]:
    """Compute dw without the last rows; ``last`` gives their number."""

    def cut(gradient: Any) -> Any:
        if gradient is None:
            return None
        rows = gradient.reshape(-1, gradient.shape[-1]).clone()
        rows[len(rows) - last(len(rows)) :] = 0
        return rows.view(gradient.shape)

    def wrong(call: Backward) -> Results:
        incoming = [f"d{name}" for name in call.operator.outputs]
        return call.results(*WEIGHTS, **{name: tree_map(cut, call[name]) for name in incoming})

    return wrong


def _writes_over_a_gradient(call: Backward) -> Results:
    gradients = call.results()
    last = [gradient for gradient in tree_leaves(call.call.incoming) if gradient is not None][-1]
    last.mul_(0.5)  # as if the kernel wrote its result into an incoming gradient
    return gradients


# ---- Faults of norms that know their consumers ----


def _of_consumers(change: Callable[[tuple[Tensor, ...]], Any]) -> Callable[[Backward], Results]:
    """Return a backward that changes the gradients of a norm's consumers, the last consumer's first."""

    def wrong(call: Backward) -> Results:
        dys = call.call.incoming[0]
        return call.results(dy=change(dys)) if isinstance(dys, tuple) else call.results()

    return wrong


def _residual_times(factor: float) -> Callable[[Backward], Results]:
    """Return a backward that scales the gradient of the sum, or of the norm's input, that comes from after the norm."""
    return lambda call: call.results() if call["ds"] is None else call.results(ds=factor * call["ds"])


def _residual_before_rounding(call: Backward) -> Results:
    """Add the residual's gradient before the gradient through the norm is rounded."""
    dys, x = call["dy"], call["x"]
    if isinstance(dys, tuple):
        dys = reduce(add, [dy.to(norm_dtype(call["spec"], x.dtype, call["weight"])) for dy in dys])
    return call.results(dy=dys, x=x.float())


def _last_reads_the_input(right: Any, memory: Any, ys: list[Tensor], dtype: Any, norm: Any, x: Tensor) -> Any:
    return right([*ys[:-1], x.to(ys[-1].dtype)] if len(ys) > 1 else ys, dtype, norm, x)


def _last_reads_the_norm_before(right: Any, memory: dict[str, Tensor], ys: list[Tensor], *others: Any) -> Any:
    before = memory.get("y", ys[-1])
    memory["y"] = ys[-1].detach()
    return right([*ys[:-1], before] if len(ys) > 1 and before.shape == ys[-1].shape else ys, *others)


def _detached_input(right: Any, memory: Any, *arguments: Any, **named: Any) -> Any:
    y, x = right(*arguments, **named)
    return y, x.detach()


def _adapter_shares_another_ones(right: Any, memory: dict[str, Tensor], layer: FusedAdapter, x: Any) -> Any:
    """Let an adapter read the output of the adapter before it in the block."""
    if isinstance(x, AdapterInput):
        before = memory.get("own", x.own)
        memory["own"] = x.own
        x = replace(x, own=before if before.grad_fn is x.own.grad_fn else x.own)
    return right(layer, x)


# ---- Faults of heads with their losses ----

_ROWS_OF_CHUNK = 16


def _chunk_ends_twice(call: Losses) -> Results:
    """Count the last row of a chunk twice, which the losses do not show: they are written to the same place."""
    losses, dx, *others = call.right()
    _, _, *again = call.right(target=_labels(call, _at_chunk_ends(call)))
    return losses, dx, *(grad if grad is None else grad + more for grad, more in zip(others, again, strict=True))


def _at_chunk_ends(call: Losses) -> Tensor:
    """Return a mask of the last of each ``_ROWS_OF_CHUNK`` rows."""
    labels = call.arguments["target"].flatten()
    return torch.arange(len(labels), device=labels.device) % _ROWS_OF_CHUNK == _ROWS_OF_CHUNK - 1


def _labels(call: Losses, mask: Tensor) -> Tensor:
    """Return the labels of these rows; all other rows are ignored."""
    target: Tensor = call.arguments["target"]
    return target.where(mask.view(target.shape), call.arguments["ignore_index"])


def _rounded_by_chunk(call: Losses) -> Results:
    losses, dx, dweight, dbias = call.right()
    if dweight is not None:
        target = call.arguments["target"]
        rows = torch.arange(target.numel(), device=target.device)
        chunks = [rows // _ROWS_OF_CHUNK == chunk for chunk in range(-(-len(rows) // _ROWS_OF_CHUNK))]
        dweight = reduce(add, [call.right(target=_labels(call, chunk))[2] for chunk in chunks])
    return losses, dx, dweight, dbias


def _ignored_rows_counted(call: Losses) -> Results:
    target, ignored = call.arguments["target"], call.arguments["ignore_index"]
    return call.right(target=target.where(target != ignored, 0), max_labels=None)


def _scaled_after_rounding(call: Losses) -> Results:
    losses, *gradients = call.right(gradient=None)
    factor = 1.0 if call.gradient is None else call.gradient
    return losses, *(gradient if gradient is None else (gradient * factor).to(gradient.dtype) for gradient in gradients)


def _gradient_of_a_neighbours_label(call: Losses) -> Results:
    target = call.arguments["target"]
    return call.right()[0], *call.right(target=target.flatten().roll(1).view(target.shape))[1:]


def _losses_wrong_without_gradients(call: Losses) -> Results:
    has_gradients = any(gradient is not None for gradient in call.right()[1:])
    return call.edited(lambda losses: losses if has_gradients else losses * 1.01, "losses")


def _dx_where_the_head_is_frozen(call: Losses) -> Results:
    is_trained = call.right()[2] is not None
    return call.edited(lambda dx: dx if is_trained else dx * 0.99, "dx")


def _writes_over_its_rows(call: Losses) -> Results:
    results = call.right()
    call.arguments["x"].detach().mul_(0.5)
    return results


def _slope_of_cap_without_its_square(call: Losses) -> Results:
    if call.arguments["softcap"] is None:
        return call.right()
    cap = call.arguments["softcap"]
    launch = linear_cross_entropy.launch_cross_entropy

    def wrong(logits: Tensor, labels: Tensor, losses: Tensor, gradient: Tensor | None, **options: Any) -> None:
        tanh = (logits.float() * (options["scale"] or 1.0) / cap).tanh()
        launch(logits, labels, losses, gradient, **options)
        if gradient is not None:
            logits.copy_(logits.float() / (1 - tanh.square()) * (1 - tanh))

    with mock.patch.object(linear_cross_entropy, "launch_cross_entropy", wrong):
        return call.right()


def _rows_in_the_mean(right: Any, memory: Any, target: Tensor, *others: Any) -> Any:
    *_, ignored = others
    return right(target.clamp(min=0) if ignored < 0 else target, *others)


def _loss_of_real_logits(right: Any, memory: Any, call: LossCall, x: Tensor, request: Any) -> Tensor:
    """Compute the loss of real logits if the model is given the number of labels in a step."""
    if request.num_items is None:
        loss: Tensor = right(call, x, request)
        return loss
    head, target = call.head, request.target.as_subclass(Tensor)
    args = target, torch.as_tensor(request.num_items), request.reduction, request.ignore_index, request.label_smoothing
    logits = request.scale, request.cap, request.in_fp32
    return reference.linear_cross_entropy(x, head.weight, head.bias, *args, *logits)


# ---- Faults of recomputation and of adapters ----


def _times_1_003(right: Any, memory: Any, *arguments: Any) -> Any:
    return tree_map(lambda tensor: tensor * 1.003, right(*arguments))


def _not_in_the_first_layer(right: Any, memory: dict[str, Any], forward: Any, layer: Any, *others: Any) -> Any:
    first = memory.setdefault("first", layer)
    return forward(layer, *others[0], **others[1]) if layer is first else right(forward, layer, *others)


def _held_for_ever(right: Any, memory: dict[str, list[Any]], *arguments: Any) -> Any:
    memory.setdefault("held", []).append(arguments[-1])
    return right(*arguments)


def _never_freed(right: Any, memory: Any, recomputed: Any, place: Any) -> Tensor:
    output: Tensor = right(recomputed, place)
    recomputed._made[place] = output
    return output


def _recomputes_as(**levels: Any) -> Planting:
    """Swap levels of ``recompute``: each key does what its value should do."""
    return with_changed_table(
        recompute,
        "_CONSUMERS_OF_LINEARS",
        lambda right: {level: right[levels.get(str(level), level)] for level in right},
    )


def _in_16_bits(right: Any, memory: Any, operator: Any, *arguments: Any) -> Any:
    y, reason = right(operator, *arguments)
    *_, dtype, _, _ = arguments
    return (y.to(dtype) if y is not None and operator is LORA_LINEAR_4BIT else y), reason


def _nothing_dropped(right: Any, memory: Any, dropout: nn.Dropout, x: Tensor) -> Any:
    return right(dropout, x) if is_disabled() else x


def _dropped_as_in_the_first(right: Any, memory: dict[str, Tensor], dropout: nn.Dropout, x: Tensor) -> Any:
    if is_disabled():
        return right(dropout, x)
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        state = memory.setdefault("state", torch.get_rng_state())
        torch.set_rng_state(state)
        return right(dropout, x)


_num_items_unheeded = in_head(
    lambda request: replace(request, num_items=(request.target != request.ignore_index).sum().clamp(min=1))
)
_real_logits = replaced_by(losses, "_why_real", lambda *_: "")

_IN_LOSSES: tuple[tuple[Any, ...], ...] = (
    ("size", in_losses(_edited(lambda losses: losses * 1.003, "losses"))),  # the loss is .3 % too large
    ("nan", in_losses(_edited(lambda losses: losses.nan_to_num(0.0), "losses"))),  # NaN becomes 0
    ("no-grad", in_losses(_losses_wrong_without_gradients)),  # wrong if no gradient is needed
    ("in-place", in_losses(_writes_over_its_rows)),  # the input is overwritten
    ("dx-size", in_losses(_edited(lambda dx: dx * 0.99, "dx"))),  # the gradient of the input is 1 % too small
    ("dw-size", in_losses(_edited(lambda dw: dw * 1.01, "dweight"))),  # the gradient of the weight is 1 % too large
    ("dw", in_losses(_edited(torch.zeros_like, "dweight"))),  # the gradient of the weight is zero
    ("dbias", in_losses(_edited(torch.zeros_like, "dbias")), "no head has a bias"),  # the gradient of the bias is zero
    ("frozen", in_losses(_dx_where_the_head_is_frozen)),  # dx is wrong if the weight is frozen
    # The last row of a chunk is left out.
    ("few", in_losses(lambda call: call.right(target=_labels(call, ~_at_chunk_ends(call))))),
    ("many", in_losses(_chunk_ends_twice)),  # dw has the last row of a chunk twice
    ("dw-chunks", in_losses(_rounded_by_chunk)),  # dw is rounded once for each chunk
    ("ignored", in_losses(_ignored_rows_counted)),  # rows without a label have one
    ("mean", replaced_by(linear_cross_entropy, "_divisor", _rows_in_the_mean)),  # rows without a label count in a mean
    # Gradients are divided by the number of labels after they are rounded.
    ("divided-late", in_losses(_scaled_after_rounding)),
    ("neighbour", in_losses(_gradient_of_a_neighbours_label)),  # the gradient is that of the label of the row before
    ("square", in_losses(_slope_of_cap_without_its_square), "no logits are capped"),
    ("unshifted", in_head(lambda request: replace(request, target=request.target.roll(1)))),  # labels are not shifted
    ("num-items", _num_items_unheeded),  # the number of labels in a step is ignored
)
"""Faults of heads with their losses: the name, the fault, and why it may be hidden."""

NO_NORM = "no linear reads a norm, so no output of a linear is recomputed at any level"
"""Why faults in what is recomputed of linears change nothing in a family whose norms stand after its branches."""

_IN_RECOMPUTATION: tuple[tuple[Any, ...], ...] = (
    ("size", replaced_by(Recompute, "outputs", _times_1_003)),  # what is recomputed is .3 % too large
    # Outputs of linears are .3 % too large if they are recomputed.
    ("linears", replaced_by(recompute_linears, "_linear", _times_1_003)),
    ("never", replaced_by(recompute, "_is_possible", lambda *_: False)),  # nothing is recomputed, silently
    # Attention silently keeps the outputs of its linears.
    ("attention", _recomputes_as(attention="mlp"), NO_NORM),
    # Outputs of no linear are recomputed.
    ("no-linears", _recomputes_as(mlp=True, attention=True), NO_NORM),
    ("one-layer", replaced_by(fused_classes, "call_recomputing", _not_in_the_first_layer)),  # one layer keeps all
    # Outputs that are recomputed are held as well.
    ("held", replaced_by(_Recomputable, "recipe_for_view", _held_for_ever)),
    ("freed", replaced_by(_Recomputable, "materialize", _never_freed)),  # what was recomputed is never freed
    ("head", _real_logits),  # logits are real, silently
)
"""Faults in what is recomputed, and in what a level of ``recompute`` saves, which changes no number."""

_IN_LAZY_LOGITS: tuple[tuple[Any, ...], ...] = (
    ("batch", logits_of_the_latest_batch, ROUNDINGS),  # logits that are read are those of the latest batch
    ("graph", replaced_by(LazyLogits, "read", lambda right, _, *lazy: right(*lazy).detach()), ROUNDINGS),
)
"""Faults of logits that are computed when they are read; the columns are as in ``_IN_LOSSES``."""

_IN_SUMS: tuple[tuple[Any, ...], ...] = (
    # Gradients are summed from the first consumer on.
    ("order", _FOR_CONSUMERS, _of_consumers(lambda dys: dys[::-1])),
    # Sums of fp32 gradients are rounded to 16 bits.
    ("early", _FOR_CONSUMERS, _of_consumers(lambda dys: reduce(add, dys))),
    ("late", _FOR_CONSUMERS, _of_consumers(lambda dys: reduce(add, [dy.float() for dy in dys]))),
    ("ds-joined", _FOR_CONSUMERS[:1], _residual_before_rounding),  # the residual's gradient joins before a rounding
)
"""Faults in the roundings of a norm that sums its consumers' gradients; the columns are as in ``_IN_BACKWARDS``."""

_AMONG_CONSUMERS: tuple[tuple[Any, ...], ...] = (
    ("input", fused_block, "NormOutputs", _last_reads_the_input),  # a linear reads the norm's input
    ("neighbour", fused_block, "NormOutputs", _last_reads_the_norm_before),  # a linear reads the norm before
    ("detached", FusedBlock, "fused_norm_passthrough", _detached_input),  # the input that is passed on has no gradient
)
"""Faults in which tensor a consumer reads: the name, the function and its owner, and the replacement."""

_IN_ADAPTERS: tuple[tuple[Any, ...], ...] = (
    # The linear's output has no gradient.
    (
        "dbase",
        "lora-dropout",
        replaced_by(LORA_ADD, "compute_grads", lambda right, _, *call: (None, *right(*call)[1:])),
    ),
    ("fallback", "lora-alone", falls_back(LORA_ADD, LORA_LINEAR)),  # runs stock code silently
    # The input is not cast if dropout is on.
    ("dropout-cast", "lora-dropout", replaced_by(FusedAdapter, "_cast_for_adapter", lambda right, _, layer, x, to: x)),
    ("dropout-none", "lora-dropout", replaced_by(nn.Dropout, "forward", _nothing_dropped)),  # nothing is dropped
    # All adapters drop the same elements.
    ("dropout-same", "lora-dropout", replaced_by(nn.Dropout, "forward", _dropped_as_in_the_first)),
    # What the adapter of a 4-bit linear reads is rounded before its dropout, too.
    ("cast-twice", "qlora-dropout", replaced_by(linear_inputs, "adapter_reads_in", lambda *_: True), ROUNDINGS),
    # Hooks see 16 bits although they see float32 in stock.
    ("16-bits", "qlora", replaced_by(adapters, "run_fused", _in_16_bits)),
    # An adapter reads another adapter's output of a norm.
    ("shared", "lora-alone", replaced_by(FusedAdapter, "forward", _adapter_shares_another_ones), ROUNDINGS),
)
"""Faults of adapters: the name, the execution, the fault, and why it may be hidden."""

_IN_FORWARDS: tuple[tuple[Any, ...], ...] = (
    # x_hat is rounded at another point than in stock.
    (
        "casting",
        _NORMED,
        _with_spec(lambda spec: {"casting": "llama" if spec.casting == "gemma" else "gemma"}),
        _16_BITS,
    ),
    # The + 1 of gamma is missing, or one too many.
    ("centering", _NORMED, _with_spec(lambda spec: {"zero_centered": not spec.zero_centered})),
    ("eps", _NORMED, _with_spec(lambda spec: {"eps": 10 * spec.eps}), "eps all but vanishes in a rounding"),
    ("size", _EVERY, _too_large),  # y is .3 % too large
    ("last-row", _EVERY, _edited(_last_row_copied)),  # the last row is a copy of the one before
    ("nan", OF_ROWS, _edited(lambda y: y.nan_to_num(0.0))),  # NaN becomes 0
    # Wrong if no gradient is needed.
    ("no-grad", _EVERY, lambda call: call.results() if call.training else call.edited(lambda y: y * 1.01)),
    ("shape", OF_ROWS, _rows_of_the_first_call),  # a second, smaller shape loses a row
    ("in-place", _EVERY, _writes_over_its_branch),  # the input is overwritten
    # The sum is normalised before it is rounded.
    ("unrounded", _NORM_OF_SUM, _sum_unrounded, _16_BITS),
    ("stream", _SUMMED, _edited(_narrow, "s"), "no sum is in fp32"),  # an fp32 sum is rounded to bf16
    ("residual", _SUMMED, lambda call: call.results(residual=torch.zeros_like(call["residual"]))),
    ("scale", (ADD_RMS_NORM,), lambda call: call.results(scale=1.0), "no branch is scaled"),  # the branch is not scaled
    ("rotation", _ROTATED, _rotated_backwards),  # rotated the wrong way
    ("position", _ROTATED, _with_angles(_of_a_neighbour)),  # rotated by a neighbour's angles from position 32 on
    ("half", (ROPE,), _half_rotated_backwards),  # the first half is rotated the wrong way
    ("unrounded", (GLU,), lambda call: call.results(gate=call["gate"].float()), _16_BITS),
    ("activation", (GLU,), _wrong_activation),
    ("tap", (CAUSAL_CONV1D,), lambda call: call.results(weight=call["weight"].roll(1, 1))),  # a tap off by one
    # SiLU is computed before the convolution is rounded.
    ("unrounded", (CAUSAL_CONV1D,), _convolution_unrounded, _16_BITS),
    ("bias", (CAUSAL_CONV1D,), lambda call: call.results(bias=None), "no convolution has a bias"),
    ("activation", (CAUSAL_CONV1D,), lambda call: call.results(activation=None), "no convolution has SiLU behind it"),
    # All sequences are rotated by the first one's angles.
    ("packed", _ROTATED, _with_angles(lambda *angles: tuple(a[:1].expand_as(a).contiguous() for a in angles))),
    # The halves of gate and up are swapped.
    ("halves", (EXPERT_GATE,), lambda call: call.results(x=call["x"].roll(call["x"].shape[-1] // 2, -1))),
    # Rows get the bias of the next expert.
    ("next-bias", (EXPERT_BIAS,), lambda call: call.results(bias=call["bias"].roll(1, 0))),
    # Rows go to the experts of the next token.
    ("next-row", (EXPERT_PERMUTE,), lambda call: call.results(position=call["position"].roll(1, 0))),
    # Rows have the weights of the next token, or of the token's next expert.
    ("next-weights", (EXPERT_UNPERMUTE,), lambda call: call.results(weights=call["weights"].roll(1, 0))),
    ("next-expert", (EXPERT_UNPERMUTE,), lambda call: call.results(weights=call["weights"].roll(1, 1))),
    ("end", (GLU,), _edited(_end_lost)),  # the end is lost if sizes are multiples of 1024
    ("even", _EVERY, _edited(_last_of_an_even_number_lost)),  # the last of an even number of rows is lost
    ("factors", OF_ADAPTERS, _factors_cut_off, "the adapter is in 16 bits"),  # a and b are truncated, not rounded
    ("cut", (LORA_ADD,), lambda call: call.results(x=_half_nearer_zero(call["x"]))),
    ("products", (LORA_ADD,), _products_unrounded),  # the products are not rounded
    ("scale", (LORA_ADD,), lambda call: call.results(scale=call["scale"] ** 2)),  # the scale is applied twice
    # Gate and up are sums of two terms each, of which the second is lost.
    ("summands", (GLU_FOR_CONSUMERS,), _second_summand_lost, "gate and up come in one piece"),
    ("gate", (GLU_FOR_CONSUMERS,), lambda call: call.results(gate=0.99 * call["gate"])),
    # The last rank is lost.
    ("rank", _WITH_RANKS, lambda call: call.results(a=torch.cat((call["a"][:-1], 0 * call["a"][-1:])))),
    ("base", (LORA_ADD,), lambda call: call.results(base=torch.zeros_like(call["base"]))),
    ("base", (LORA_LINEAR,), lambda call: call.results(w=torch.zeros_like(call["w"]))),
    ("factor", _WITH_LINEARS, lambda call: call.results(factor=call["factor"] ** 2)),  # it is applied twice
    ("cut", _WITH_LINEARS, lambda call: call.results(adapter_x=_half_nearer_zero(call["adapter_x"]))),
    ("absmax", _IN_4_BITS, lambda call: call.results(scale=call["scale"].roll(-1))),  # of the next block
    # The two codes of a byte are swapped.
    ("codes", _IN_4_BITS, lambda call: call.results(packed=call["packed"] << 4 | call["packed"] >> 4)),
    # The offset of double quantisation is lost.
    ("offset", _IN_4_BITS, lambda call: call.results(offset=torch.zeros_like(call["offset"]))),
    ("copy", _FOR_CONSUMERS, _copy_cut_off, "nothing is copied"),  # the copy in 16 bits is truncated, not rounded
)
"""Forms of faults in forwards: the name, the operators, the wrong forward, and why it may be hidden."""

_IN_BACKWARDS: tuple[tuple[Any, ...], ...] = (
    ("back", (ROPE,), lambda call: call.results(sin=-call["sin"])),  # the gradient is rotated on instead of back
    # The gradient between the products lacks the scale.
    ("dh", (LORA_ADD,), lambda call: call.results("dx", "da", scale=1.0)),
    ("dh", _WITH_LINEARS, lambda call: call.results("dadapter_x", "da", factor=1.0)),
    ("dbase", (LORA_LINEAR,), _edited(torch.zeros_like, "dx")),  # the linear passes no gradient on
    ("absmax-back", _IN_4_BITS, lambda call: call.results(scale=call["scale"].roll(-1))),
    # The gradient of b uses other rows.
    ("shifted", _WITH_RANKS, lambda call: call.results(h=call["h"].roll(1, -2))),
    ("dgate", (GLU,), _edited(lambda dgate: dgate * 1.003, "dgate")),  # the gradient of the gate is .3 % too large
    ("square", (GLU,), _slope_without_its_square, "no GELU by tanh"),  # a slope without its square term
    # The gradients of weights are those of another expert.
    ("dweights", (EXPERT_UNPERMUTE,), _edited(lambda dweights: dweights.roll(1, 1), "dweights")),
    ("swapped", (GLU,), _gradients_swapped),  # the gradients of gate and up are swapped
    # The gradient of a filter is that of the next channel.
    ("dw-channel", (CAUSAL_CONV1D,), _edited(lambda dw: dw.roll(1, 0), "dweight")),
    ("dw-tap", (CAUSAL_CONV1D,), _edited(lambda dw: dw.roll(1, 1), "dweight")),  # ... of the next tap
    ("dbias", (CAUSAL_CONV1D,), _edited(lambda dbias: dbias * 0.99, "dbias"), "no convolution has a bias"),
    ("dbias", (EXPERT_BIAS,), _edited(lambda dbias: dbias * 0.99, "dbias")),
    ("dbias-next", (EXPERT_BIAS,), _edited(lambda dbias: dbias.roll(1, 0), "dbias")),  # that of the next expert
    ("ahead", (CAUSAL_CONV1D,), _edited(lambda dx: dx.roll(1, 1), "dx")),  # the gradient of x is that of the row before
    # The gradient of the input is 1 % too small.
    ("dx-size", _EVERY_BACKWARD, _edited(lambda dx: dx * 0.99, *_INPUTS)),
    # The gradient of the input is truncated, not rounded.
    ("dx-cut", _EVERY_BACKWARD, _edited(_half_nearer_zero, *_INPUTS), _16_BITS),
    # The gradient of an fp32 stream is rounded to bf16.
    ("dr-stream", _WITH_WEIGHTS[:3], _edited(_narrow, "dr", "dx"), "no stream is in fp32"),
    ("dw-size", _WITH_WEIGHTS, _edited(lambda dw: dw * 1.01, *WEIGHTS)),  # the gradient of a weight is 1 % too large
    ("dw", _WITH_WEIGHTS, _edited(torch.zeros_like, *WEIGHTS)),  # the gradient of a weight is zero
    ("dw-tile", _WITH_WEIGHTS, _without_rows(lambda rows: 8)),  # dw lacks the last eight rows
    ("dw-share", _WITH_WEIGHTS, _without_rows(lambda rows: rows // 4)),  # dw lacks a quarter of the rows
    # dx is wrong if the weight is frozen.
    ("frozen", tuple(op for op in _WITH_WEIGHTS if op is not LORA_ADD), _dx_where_the_weight_is_frozen),
    ("frozen", (LORA_ADD,), _dx_where_the_weight_is_frozen, "the first layer's input has no gradient"),
    # The gradient of the first consumer is missing.
    ("dropped", (*_FOR_CONSUMERS, GLU_FOR_CONSUMERS), _of_consumers(lambda dys: dys[:-1])),
    # That of the last consumer counts twice.
    ("doubled", _FOR_CONSUMERS, _of_consumers(lambda dys: (2 * dys[0], *dys[1:]))),
    ("ds", _FOR_CONSUMERS, _residual_times(0.0)),  # the gradient of the residual is missing
    ("ds-twice", _FOR_CONSUMERS, _residual_times(2.0)),  # the gradient of the residual counts twice
    ("ds-in-place", _EVERY_BACKWARD, _writes_over_a_gradient),  # an incoming gradient is overwritten
    ("ds-in-place", (EXPERT_BIAS,), _writes_over_a_gradient, "the product that shares this gradient has read it"),
)


def _faults() -> Iterator[Fault]:
    for planting, forms in ((in_forward, _IN_FORWARDS), (in_backward, _IN_BACKWARDS)):
        for name, operators, wrong, *hidden in forms:
            for operator in operators:
                where = "qlora" if operator in _OF_QLORA else "eager"
                # On a CPU, where PyTorch draws what is dropped, the linear is called.
                where = {LINEAR_4BIT: "qlora-qv", LORA_ADD: "lora-dropout", LORA_LINEAR: "lora"}.get(operator, where)
                yield Fault(f"{operator.name}-{name}", planting(operator, wrong), *hidden, where=where)

    for name, wrong in (
        ("columns", _scales_of_columns),  # codes have the scales of columns, not of rows
        ("stale", _scale_of_the_first_call),  # the scale is that of the first call
        ("unsaturated", _not_saturated),  # values beyond the largest code become NaN
    ):
        yield Fault(f"{NORM_FP8.name}-{name}", in_forward(NORM_FP8, wrong), where="fp8")

    for operator in (RMS_NORM, ADD_RMS_NORM):
        yield Fault(f"{operator.name}-compiled-dw", in_compiled_backward(operator), where="compile")
    for operator in _IN_MODELS:
        planted = in_forward(operator, _too_large_in_a_backward)
        yield Fault(f"{operator.name}-checkpointed", planted, where="checkpointing")
    for name, operators, wrong in _IN_SUMS:
        for operator in operators:
            yield Fault(f"{operator.name}-{name}", in_backward(operator, wrong), ROUNDINGS, "consumers")
    for name, owner, function, wrong in _AMONG_CONSUMERS:
        yield Fault(f"consumers-{name}", replaced_by(owner, function, wrong), where="consumers")
    for name, where, planted, *hidden in _IN_ADAPTERS:
        yield Fault(f"adapter-{name}", planted, *hidden, where=where)
    for what_has_it, faults in ((LINEAR_CROSS_ENTROPY.name, _IN_LOSSES), ("lazy_logits", _IN_LAZY_LOGITS)):
        for name, planted, *hidden in faults:
            yield Fault(f"{what_has_it}-{name}", planted, *hidden, where="loss")
    for name, planted, *hidden in _IN_RECOMPUTATION:
        yield Fault(f"recomputed-{name}", planted, *hidden, where="recompute")
    planting = with_changed_table(LinearOutputs, "_READ", lambda nodes: nodes | {"LoraLinearBackward": lambda *_: None})
    yield Fault("recomputed-adapters", planting, where="lora-recompute")
    passthrough = partial(replaced_by, FusedBlock, "fused_norm_passthrough")
    one_row = falls_back(*_IN_MODELS, where=lambda x: len(x) == 1 and torch.is_grad_enabled())
    for name, planted in (
        ("fallback-rotated", falls_back(QK_NORM, ROPE, GLU)),  # runs its parts silently
        ("fallback-sandwich", falls_back(NORM_ADD_NORM)),  # runs its parts silently
        ("fallback-onto", falls_back(NORM_ADD)),  # runs its parts silently
        ("fallback-head", _real_logits),  # logits are real, silently
        ("fallback-one-row", one_row),  # runs stock code for one sequence with gradients
        # Linears read one tensor, silently.
        ("consumers-none", replaced_by(fused_block, "consumer_spec", lambda *_: None)),
        # A residual's gradient is added by autograd.
        ("consumers-unjoined", passthrough(lambda right, _, block, norm, x, *consumer: (norm(x), x))),
        # The residual connection reads past the norm.
        ("consumers-past", passthrough(lambda right, _, block, *call: (right(block, *call)[0], call[1]))),
        # The loss of a step with counted labels reads logits.
        ("fallback-counted", replaced_by(LossCall, "_loss", _loss_of_real_logits)),
        # Norms write float32 for linears that read 16 bits.
        ("consumers-wide", never_answers(linear_inputs, "_wide_consumers")),
        ("attention-wide", never_answers(FusedBlock, "fused_norm_read_dtype")),  # queries are written in float32
        ("num-items-unheeded", _num_items_unheeded),  # the number of labels in a step is ignored
        ("left-stock", left_stock),  # one block has its stock class, and the report says fused
    ):
        yield Fault(name, planted, where="sites")


FAULTS: Mapping[str, Fault] = MappingProxyType({fault.name: fault for fault in _faults()})
