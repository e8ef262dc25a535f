"""The faults that are planted in fused operators and blocks, one at a time, to see that the verdict turns red.

Each stands for a mistake that kernels or patchers have made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fused_norm.kernels import reference
from fused_norm.kernels.add_rms_norm import ADD_RMS_NORM
from fused_norm.kernels.fp8.operators import NORM_FP8
from fused_norm.kernels.gated_rms_norm import GATED_RMS_NORM
from fused_norm.kernels.glu import GLU
from fused_norm.kernels.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from fused_norm.kernels.lora_add import LORA_ADD
from fused_norm.kernels.norm_add import NORM_ADD
from fused_norm.kernels.norm_add_norm import NORM_ADD_NORM
from fused_norm.kernels.norms_for_readers import (
    ADD_RMS_NORM_FOR_READERS,
    NORM_ADD_NORM_FOR_READERS,
    RMS_NORM_FOR_READERS,
)
from fused_norm.kernels.qk_norm import QK_NORM
from fused_norm.kernels.rms_norm import RMS_NORM
from fused_norm.kernels.rope import ROPE
from fused_norm.kernels.triton.memory import norm_dtype
from fused_norm.patcher import fused_block, fused_classes, linear_inputs, losses
from fused_norm.patcher.adapters import FusedAdapter
from fused_norm.patcher.fused_block import FusedBlock
from fused_norm.patcher.fused_norm_module import is_disabled
from fused_norm.patcher.lazy_logits import LazyLogits
from fused_norm.patcher.losses import LossCall
from fused_norm.patcher.recompute import _Recomputed
from fused_norm.spec import Casting

from .planting import (
    WEIGHTS,
    Backward,
    Forward,
    Losses,
    Planting,
    adapters_not_recomputed,
    falls_back,
    in_backward,
    in_compiled_backward,
    in_forward,
    in_head,
    in_losses,
    left_stock,
    linear_cross_entropy,
    linears_recomputed_wrong,
    logits_of_the_latest_batch,
    never_answers,
    never_recomputes,
    recomputed_wrong,
    recomputes_as,
    replaced_by,
)

_NORMED = (RMS_NORM, ADD_RMS_NORM, NORM_ADD, NORM_ADD_NORM, QK_NORM, GATED_RMS_NORM)
_IN_MODELS = (*_NORMED, ROPE, GLU)
_EVERY = (*_IN_MODELS, LORA_ADD)
_NORM_OF_SUM = (ADD_RMS_NORM, NORM_ADD_NORM)
_ROTATED = (QK_NORM, ROPE)
_SUMMED = (ADD_RMS_NORM, NORM_ADD, NORM_ADD_NORM)
# norm_add has the backward of rms_norm.
_WITH_WEIGHTS = (RMS_NORM, ADD_RMS_NORM, NORM_ADD_NORM, QK_NORM, GATED_RMS_NORM, LORA_ADD)
_EVERY_BACKWARD = (*_WITH_WEIGHTS, ROPE, GLU)
_FOR_READERS = (RMS_NORM_FOR_READERS, ADD_RMS_NORM_FOR_READERS, NORM_ADD_NORM_FOR_READERS)
_INPUTS = ("dx", "dr", "dq", "dk", "dgate", "dup")
_16_BITS = "nothing is rounded in fp32"
ROUNDINGS = "it changes no rounding that is compared: its dtypes leave none, or this is a GPU"


@dataclass(frozen=True)
class Fault:
    """A fault that can be planted.

    Attributes:
        name: its key in ``FAULTS``.
        what: is wrong, in words.
        planted: puts it in its place for the length of a ``with``.
        hidden: why it may change no number in some models and precisions; empty for one that always does.
        where: what runs it: ``eager`` for single calls of operators, ``sites`` for whole models that run eagerly,
            ``readers`` for a step of one whose norms know their readers, another execution of the suite, those of calls
            of adapters and of heads among them, or ``fp8`` for calls of operators that write FP8 codes, which no model
            makes by itself.
    """

    name: str
    what: str
    planted: Planting
    hidden: str = ""
    where: str = "eager"

    @property
    def operator(self) -> str:
        """The name of the operator that goes wrong, or of that which it is a form of."""
        return self.name.partition("-")[0].removesuffix("_for_readers")


# ---- Faults of FP8 codes ----


def _result_of(call: Forward) -> Tensor:
    """The norm's result y, which is what codes are of."""
    x, residual, weight, _, _, scale = call.arguments[:6]
    assert call.spec is not None
    if residual is None:
        y = RMS_NORM.forward(call.spec, x, weight, None, training=False)[0]
    else:
        y = ADD_RMS_NORM.forward(call.spec, x, residual, weight, None, scale, training=False)[0]
    assert isinstance(y, Tensor)
    return y


def _cast_by(call: Forward, multiplier: Tensor, *, saturated: bool = True) -> list[Tensor | None]:
    """The results, their codes made of y by this multiplier."""
    results = call.results()
    q = results[0]
    assert q is not None
    top = torch.finfo(q.dtype).max
    scaled = _result_of(call).float() * multiplier
    beyond = scaled.clamp(-top, top) if saturated else scaled.where(scaled.abs() <= top, torch.nan)
    results[0] = beyond.to(q.dtype)
    return results


def _scales_of_columns(call: Forward) -> Sequence[Tensor | None]:
    """Codes made by a scale for each column, read with one for each row."""
    y = _result_of(call)
    top = torch.finfo(torch.float8_e4m3fn).max
    by_column = top / y.float().abs().flatten(0, -2).amax(0).clamp(min=1e-12)
    return _cast_by(call, torch.exp2(by_column.log2().floor()))


def _scale_of_the_first_call(call: Forward) -> Sequence[Tensor | None]:
    scale = call.results()[1]
    assert scale is not None
    first = call.memory.setdefault("scale", scale.clone())
    results = _cast_by(call, first.reciprocal())
    results[1] = first.clone()
    return results


def _not_saturated(call: Forward) -> Sequence[Tensor | None]:
    """The scale is half of what it has to be, and codes beyond the largest one are NaN."""
    scale = call.results()[1]
    assert scale is not None
    results = _cast_by(call, 2 * scale.reciprocal(), saturated=False)
    results[1] = scale / 2
    return results


# ---- Faults of forwards ----


def _other_casting(call: Forward) -> Sequence[Tensor | None]:
    assert call.spec is not None
    casting: Casting = "llama" if call.spec.casting == "gemma" else "gemma"
    wrong, right = call.results(spec=replace(call.spec, casting=casting)), call.results()
    return [
        one if one is None or other is None else one.to(other.dtype) for one, other in zip(wrong, right, strict=True)
    ]


def _other_centering(call: Forward) -> Sequence[Tensor | None]:
    assert call.spec is not None
    return call.results(spec=replace(call.spec, zero_centered=not call.spec.zero_centered))


def _larger_eps(call: Forward) -> Sequence[Tensor | None]:
    assert call.spec is not None
    return call.results(spec=replace(call.spec, eps=10 * call.spec.eps))


def _too_large(call: Forward) -> Sequence[Tensor | None]:
    return call.edited(lambda y: y * 1.003, call.operator.outputs[0])


def _last_row_copied(call: Forward) -> Sequence[Tensor | None]:
    def copied(y: Tensor) -> Tensor:
        wrong = y.clone()
        wrong[-1:, ..., -1:, :] = y[-1:, ..., -2:-1, :]
        return wrong

    return call.edited(copied)


def _nan_to_zero(call: Forward) -> Sequence[Tensor | None]:
    return call.edited(lambda y: y.nan_to_num(0.0))


def _wrong_without_gradients(call: Forward) -> Sequence[Tensor | None]:
    return call.results() if call.training else call.edited(lambda y: y * 1.01)


def _rows_of_the_first_call(call: Forward) -> Sequence[Tensor | None]:
    rows = call.arguments[0].shape[0]
    first = call.memory.setdefault(call.arguments[0].shape[-1:], rows)
    if rows >= first:
        return call.results()
    return call.edited(lambda y: torch.where(torch.arange(y.shape[-2], device=y.device)[:, None] > 0, y, 0.0))


def _normed_before_rounded(call: Forward) -> Sequence[Tensor | None]:
    """The norm of the sum as it was before it was rounded."""
    results = call.results()
    x, residual = call.arguments[:2]
    wide = (x.float(), residual.float(), *call.arguments[2:])
    exact = call.results(arguments=wide)[0]
    assert exact is not None
    assert results[0] is not None
    results[0] = exact.to(results[0].dtype)
    return results


def _narrow_stream(call: Forward) -> Sequence[Tensor | None]:
    return call.edited(lambda s: s.bfloat16().to(s.dtype) if s.dtype == torch.float32 else s, "s")


def _no_residual(call: Forward) -> Sequence[Tensor | None]:
    x, residual, *rest = call.arguments
    return call.results(arguments=(x, torch.zeros_like(residual), *rest))


def _writes_over_its_branch(call: Forward) -> Sequence[Tensor | None]:
    results = call.results()
    with torch.no_grad():
        call.operator.by_name(call.arguments).get("x", call.arguments[0]).detach().mul_(0.5)
    return results


def _no_scale(call: Forward) -> Sequence[Tensor | None]:
    return call.results(arguments=tuple((call.operator.by_name(call.arguments) | {"scale": 1.0}).values()))


def _rotated_the_other_way(call: Forward) -> Sequence[Tensor | None]:
    *others, cos, sin = call.arguments[: call.operator.tensor_count]
    turned = (*others, cos, None if sin is None else -sin)
    return call.results(arguments=turned + call.arguments[len(turned) :])


def _rotated_by_a_neighbour(call: Forward) -> Sequence[Tensor | None]:
    *others, cos, sin = call.arguments[: call.operator.tensor_count]
    if cos is None or cos.shape[-2] <= 32:
        return call.results()
    late = [torch.cat((one[..., :32, :], one[..., 31:-1, :]), dim=-2) for one in (cos, sin)]
    return call.results(arguments=(*others, *late, *call.arguments[call.operator.tensor_count :]))


def _half_of_it_rotated_the_other_way(call: Forward) -> Sequence[Tensor | None]:
    """The partner of the first half is added instead of taken off."""
    rotary = call.arguments[call.operator.tensor_count - 1].shape[-1]

    def mixed(right: Tensor | None, wrong: Tensor | None) -> Tensor | None:
        if right is None or wrong is None:
            return right
        return torch.where(torch.arange(right.shape[-1], device=right.device) < rotary // 2, wrong, right)

    return [mixed(*pair) for pair in zip(call.results(), _rotated_the_other_way(call), strict=True)]


def _activation_unrounded(call: Forward) -> Sequence[Tensor | None]:
    gate, up, activation = call.arguments
    (right,) = call.results()
    assert right is not None
    (exact,) = call.results(arguments=(gate.float(), up, activation))
    assert exact is not None
    return [exact.to(right.dtype)]


def _other_activation(call: Forward) -> Sequence[Tensor | None]:
    *tensors, activation = call.arguments
    return call.results(arguments=(*tensors, "gelu" if activation == "gelu_tanh" else "gelu_tanh"))


def _rotated_as_the_first_sequence(call: Forward) -> Sequence[Tensor | None]:
    *others, cos, sin = call.arguments[: call.operator.tensor_count]
    if cos is None or len(cos) == 1:
        return call.results()
    first = [one[:1].expand_as(one).contiguous() for one in (cos, sin)]
    return call.results(arguments=(*others, *first, *call.arguments[call.operator.tensor_count :]))


def _without_its_end(call: Forward) -> Sequence[Tensor | None]:
    """A few numbers at the end are not written, where sizes are multiples of 1024."""

    def cut(y: Tensor) -> Tensor:
        return y if y.numel() % 1024 else torch.cat((y.flatten()[:-32], y.new_zeros(32))).view(y.shape)

    return call.edited(cut)


def _last_of_an_even_number_lost(call: Forward) -> Sequence[Tensor | None]:
    def lost(y: Tensor) -> Tensor:
        return y if y.shape[-2] % 2 else torch.cat((y[..., :-1, :], torch.zeros_like(y[..., -1:, :])), dim=-2)

    return call.edited(lost)


def _too_large_in_a_backward(call: Forward) -> Sequence[Tensor | None]:
    return _too_large(call) if torch._C._current_graph_task_id() != -1 else call.results()


def _factors_cut_off(call: Forward) -> Sequence[Tensor | None]:
    base, x, a, b, scale = call.arguments
    cut = [one if one.dtype == x.dtype else _cut_off(one).to(x.dtype) for one in (a, b)]
    return call.results(arguments=(base, x, *cut, scale))


def _input_cut_off(call: Forward) -> Sequence[Tensor | None]:
    base, x, *others = call.arguments
    return [call.results(arguments=(base, _half_nearer_zero(x), *others))[0], *call.results()[1:]]


def _products_unrounded(call: Forward) -> Sequence[Tensor | None]:
    base, x, a, b, scale = call.arguments
    right, *kept = call.results()
    assert right is not None
    exact = call.results(arguments=(base, x.float(), a.to(x.dtype), b.to(x.dtype), scale))[0]
    assert exact is not None
    return [exact.to(right.dtype), *kept]


def _scaled_twice(call: Forward) -> Sequence[Tensor | None]:
    *tensors, scale = call.arguments
    return call.results(arguments=(*tensors, scale * scale))


def _last_of_the_rank_lost(call: Forward) -> Sequence[Tensor | None]:
    base, x, a, b, scale = call.arguments
    return call.results(arguments=(base, x, torch.cat((a[:-1], 0 * a[-1:])), b, scale))


def _adapter_without_base(call: Forward) -> Sequence[Tensor | None]:
    base, *others = call.arguments
    return call.results(arguments=(torch.zeros_like(base), *others))


def _trains_one_sequence(x: Tensor) -> bool:
    return len(x) == 1 and torch.is_grad_enabled()


# ---- Faults of backwards ----


def _times(factor: float, *names: str) -> Callable[[Backward], Sequence[Tensor | None]]:
    """The gradients of these names, multiplied."""
    return lambda call: call.edited(lambda gradient: gradient * factor, *names)


def _turned_on(call: Backward) -> Sequence[Tensor | None]:
    cos, sin = call.call.saved
    return call.right(call.spec, call.call._replace(saved=(cos, -sin)))


def _gradients_swapped(call: Backward) -> Sequence[Tensor | None]:
    dgate, dup = call.right(call.spec, call.call)
    if dgate is not None and call.call.saved[1] is None:
        return torch.cat(dgate.chunk(2, dim=-1)[::-1], dim=-1), None
    return (dup, dgate) if dgate is not None and dup is not None else (dgate, dup)


def _slope_without_its_square(call: Backward) -> Sequence[Tensor | None]:
    """The slope of the tanh GELU, the inner polynomial differentiated as if it were linear."""
    found = list(call.right(call.spec, call.call))
    gate, up = call.call.saved
    if "gelu_tanh" not in call.call.facts or up is None or found[0] is None:
        return found
    x, root = gate.float(), (2 / torch.pi) ** 0.5
    t = torch.tanh(root * (x + 0.044715 * x**3))
    slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root
    found[0] = (call.call.incoming[0].float() * up.float() * slope).to(found[0].dtype)
    return found


def _gradients_cut_off(call: Backward) -> Sequence[Tensor | None]:
    """16-bit gradients as they are if fp32 is cut off: half of the time the neighbour that is nearer zero."""

    return call.edited(lambda one: one if one.dtype == torch.float32 else _half_nearer_zero(one), *_INPUTS)


def _half_nearer_zero(x: Tensor) -> Tensor:
    """Half of 16-bit numbers replaced by the neighbour that is nearer zero."""
    bits = x.contiguous().view(torch.int16)
    cut = (torch.arange(x.numel(), device=x.device) % 2).view(x.shape).to(torch.int16)
    return torch.where(x == 0, bits, bits - cut).view(x.dtype)


def _narrow_gradient_of_stream(call: Backward) -> Sequence[Tensor | None]:
    return call.edited(lambda dr: dr.bfloat16().to(dr.dtype) if dr.dtype == torch.float32 else dr, "dr", "dx")


def _dx_where_the_weight_is_frozen(call: Backward) -> Sequence[Tensor | None]:
    weights = [need for name, need in zip(call.operator.gradients, call.call.needed, strict=True) if name in WEIGHTS]
    return call.edited(lambda dx: dx if any(weights) else dx * 0.99, *_INPUTS)


def _scale_left_out(call: Backward) -> Sequence[Tensor | None]:
    """dh lacks the scale, and so do the gradients that are made of it."""
    *_, db = call.right(call.spec, call.call)
    return *call.right(call.spec, call.call._replace(facts=(1.0, *call.call.facts[1:])))[:-1], db


def _rows_of_a_neighbour(call: Backward) -> Sequence[Tensor | None]:
    """db of every row's gradient and the row before it between the products."""
    *others, h = call.call.saved
    return call.right(call.spec, call.call._replace(saved=(*others, h.roll(1, -2))))


def _without_rows(last: Callable[[int], int]) -> Callable[[Backward], Sequence[Tensor | None]]:
    """dw without the last rows, as many as ``last`` says of all."""

    def wrong(call: Backward) -> Sequence[Tensor | None]:
        def cut(gradient: Any) -> Any:
            if gradient is None:
                return None
            rows = gradient.reshape(-1, gradient.shape[-1]).clone()
            rows[len(rows) - last(len(rows)) :] = 0
            return rows.view(gradient.shape)

        found = list(call.right(call.spec, call.call))
        less = call.right(call.spec, call.call._replace(incoming=tree_map(cut, tuple(call.call.incoming))))
        for place, name in enumerate(call.operator.gradients):
            if name in WEIGHTS:
                found[place] = less[place]
        return found

    return wrong


def _writes_over_a_gradient(call: Backward) -> Sequence[Tensor | None]:
    found = call.right(call.spec, call.call)
    last = [gradient for gradient in tree_leaves(call.call.incoming) if gradient is not None][-1]
    last.mul_(0.5)  # the kernel has written its own result where somebody else's gradient was
    return found


# ---- Faults of norms that know their readers ----


def _of_readers(change: Callable[[tuple[Tensor, ...]], Any]) -> Callable[[Backward], Sequence[Tensor | None]]:
    """A backward with other gradients of a norm's readers, of which that of the last one comes first."""

    def wrong(call: Backward) -> Sequence[Tensor | None]:
        dys, ds = call.call.incoming
        return call.right(call.spec, call.call._replace(incoming=(change(dys) if isinstance(dys, tuple) else dys, ds)))

    return wrong


def _residual_times(factor: float) -> Callable[[Backward], Sequence[Tensor | None]]:
    """A backward with a multiple of the gradient of what reads the sum, or the norm's input, behind the norm."""

    def wrong(call: Backward) -> Sequence[Tensor | None]:
        dys, ds = call.call.incoming
        return call.right(call.spec, call.call._replace(incoming=(dys, None if ds is None else factor * ds)))

    return wrong


def _residual_before_rounding(call: Backward) -> Sequence[Tensor | None]:
    """The gradient through the norm is not rounded before that of the residual connection is added."""
    assert call.spec is not None
    dys, ds = call.call.incoming
    x, weight, rstd = call.call.saved
    if isinstance(dys, tuple):
        dys = reduce(add, [dy.to(norm_dtype(call.spec, x.dtype, weight)) for dy in dys])
    exact = call.call._replace(incoming=(dys, ds), saved=(x.float(), weight, rstd))
    dx, dw = call.right(call.spec, exact)
    return None if dx is None else dx.to(x.dtype), dw


def _copy_cut_off(call: Forward) -> Sequence[Tensor | None]:
    *given, _ = call.arguments
    results, exact = call.results(), call.results(arguments=(*given, None))[0]
    assert results[0] is not None
    assert exact is not None
    if exact.dtype != results[0].dtype:
        results[0] = _cut_off(exact).to(results[0].dtype)
    return results


def _last_reads_the_input(right: Any, memory: Any, found: tuple[Tensor, ...], *wanted: Any) -> Any:
    *ys, y, s = found
    return right((*ys, s.to(y.dtype), s) if ys else found, *wanted)


def _last_reads_the_norm_before(right: Any, memory: dict[str, Tensor], found: tuple[Tensor, ...], *wanted: Any) -> Any:
    *ys, y, s = found
    before = memory.get("y", y)
    memory["y"] = y.detach()
    return right((*ys, before, s) if ys and before.shape == y.shape else found, *wanted)


def _none_is_wanted(*_: Any) -> None:
    return None


def _not_joined(right: Any, memory: Any, block: FusedBlock, norm: Any, x: Tensor, reader: Any = None) -> Any:
    return norm(x), x


def _handed_on_past_the_norm(right: Any, memory: Any, block: FusedBlock, norm: Any, x: Tensor, *reader: Any) -> Any:
    return right(block, norm, x, *reader)[0], x


def _detached_input(right: Any, memory: Any, *arguments: Any, **named: Any) -> Any:
    y, x = right(*arguments, **named)
    return y, x.detach()


def _adapter_shares_another_ones(right: Any, memory: dict[str, Tensor], x: Tensor, own: Tensor) -> Any:
    """An adapter reads the output that is there for the adapter before it in the block."""
    before = memory.get("own", own)
    memory["own"] = own
    return right(x, before if before.grad_fn is own.grad_fn else own)


# ---- Faults of heads with their losses ----


def _all_but_chunk_ends(call: Losses) -> Sequence[Tensor | None]:
    return call.right(target=_labels(call, ~_at_chunk_ends(call)))


def _chunk_ends_twice(call: Losses) -> Sequence[Tensor | None]:
    """The chunk after a row has it once more, which the losses do not show: they are written to the same place."""
    losses, dx, *others = call.right()
    _, _, *again = call.right(target=_labels(call, _at_chunk_ends(call)))
    return losses, dx, *(one if one is None else one + more for one, more in zip(others, again, strict=True))


def _at_chunk_ends(call: Losses) -> Tensor:
    """A mask of the last of each ``_ROWS_OF_CHUNK`` rows."""
    labels = call.arguments["target"].flatten()
    return torch.arange(len(labels), device=labels.device) % _ROWS_OF_CHUNK == _ROWS_OF_CHUNK - 1


def _labels(call: Losses, kept: Tensor) -> Tensor:
    """The labels of these rows; the others have none."""
    target: Tensor = call.arguments["target"]
    return target.where(kept.view(target.shape), call.arguments["ignore_index"])


def _rounded_by_chunk(call: Losses) -> Sequence[Tensor | None]:
    losses, dx, dweight, dbias = call.right()
    if dweight is not None:
        target = call.arguments["target"]
        rows = torch.arange(target.numel(), device=target.device)
        chunks = [rows // _ROWS_OF_CHUNK == chunk for chunk in range(-(-len(rows) // _ROWS_OF_CHUNK))]
        dweight = reduce(add, [call.right(target=_labels(call, chunk))[2] for chunk in chunks])
    return losses, dx, dweight, dbias


def _ignored_rows_counted(call: Losses) -> Sequence[Tensor | None]:
    target, ignored = call.arguments["target"], call.arguments["ignore_index"]
    return call.right(target=target.where(target != ignored, 0), max_labels=None)


def _scaled_after_rounding(call: Losses) -> Sequence[Tensor | None]:
    losses, *gradients = call.right(gradient=None)
    factor = 1.0 if call.gradient is None else call.gradient
    return losses, *(one if one is None else (one * factor).to(one.dtype) for one in gradients)


def _gradient_of_a_neighbours_label(call: Losses) -> Sequence[Tensor | None]:
    target = call.arguments["target"]
    return call.right()[0], *call.right(target=target.flatten().roll(1).view(target.shape))[1:]


def _edited(place: int, edit: Callable[[Tensor], Tensor]) -> Callable[[Losses], Sequence[Tensor | None]]:
    """The losses, or the gradient of x, weight or bias, changed."""

    def wrong(call: Losses) -> Sequence[Tensor | None]:
        found = call.right()
        found[place] = None if (one := found[place]) is None else edit(one)
        return found

    return wrong


def _losses_wrong_without_gradients(call: Losses) -> Sequence[Tensor | None]:
    losses, *gradients = call.right()
    assert losses is not None
    return (losses if any(one is not None for one in gradients) else losses * 1.01), *gradients


def _dx_where_the_head_is_frozen(call: Losses) -> Sequence[Tensor | None]:
    losses, dx, dweight, dbias = call.right()
    return losses, dx * 0.99 if dx is not None and dweight is None else dx, dweight, dbias


def _writes_over_its_rows(call: Losses) -> Sequence[Tensor | None]:
    found = call.right()
    call.arguments["x"].detach().mul_(0.5)
    return found


def _slope_of_cap_without_its_square(call: Losses) -> Sequence[Tensor | None]:
    if call.arguments["softcap"] is None:
        return call.right()
    cap = call.arguments["softcap"]
    launch = linear_cross_entropy.launch_cross_entropy

    def wrong(logits: Tensor, labels: Tensor, losses: Tensor, gradient: Tensor | None, **how: Any) -> None:
        tanh = (logits.float() * (how["scale"] or 1.0) / cap).tanh()
        launch(logits, labels, losses, gradient, **how)
        if gradient is not None:
            logits.copy_(logits.float() / (1 - tanh.square()) * (1 - tanh))

    with mock.patch.object(linear_cross_entropy, "launch_cross_entropy", wrong):
        return call.right()


def _rows_in_the_mean(right: Any, memory: Any, target: Tensor, *others: Any) -> Any:
    *_, ignored = others
    return right(target.clamp(min=0) if ignored < 0 else target, *others)


def _cut_from_the_graph(right: Any, memory: Any, lazy: LazyLogits, reader: str) -> Tensor:
    found: Tensor = right(lazy, reader).detach()
    return found


def _loss_of_real_logits(right: Any, memory: Any, call: LossCall, x: Tensor, how: Any) -> Tensor:
    """The loss of real logits if the model is given the number of labels in a step."""
    if how.num_items is None:
        found: Tensor = right(call, x, how)
        return found
    head, target = call.head, how.target.as_subclass(Tensor)
    given = x, head.weight, head.bias, target, torch.as_tensor(how.num_items), how.reduction, how.ignore_index
    return reference.linear_cross_entropy(*given, how.label_smoothing, how.scale, how.cap, how.in_fp32)


# ---- Faults of recomputation ----


def _not_in_the_first_layer(right: Any, memory: dict[str, Any], forward: Any, layer: Any, *others: Any) -> Any:
    first = memory.setdefault("first", layer)
    return forward(layer, *others[0], **others[1]) if layer is first else right(forward, layer, *others)


def _held_for_ever(right: Any, memory: dict[str, list[Any]], *arguments: Any) -> Any:
    memory.setdefault("held", []).append(arguments[-1])
    return right(*arguments)


def _never_freed(right: Any, memory: Any, recomputed: Any, wanted: Any) -> Tensor:
    found: Tensor = right(recomputed, wanted)
    recomputed._made[wanted] = found
    return found


# ---- Faults of adapters ----


def _cut_off(x: Tensor) -> Tensor:
    """The numbers of an fp32 tensor that are left if it is cut off to 16 bits."""
    return (x.view(torch.int32) & -(2**16)).view(torch.float32)


def _no_gradient_of_base(right: Any, memory: Any, *arguments: Any) -> Any:
    return None, *right(*arguments)[1:]


def _not_cast(right: Any, memory: Any, layer: Any, x: Tensor, dtype: torch.dtype) -> Any:
    return x


def _nothing_dropped(right: Any, memory: Any, dropout: nn.Dropout, x: Tensor) -> Any:
    return right(dropout, x) if is_disabled() else x


def _dropped_as_in_the_first(right: Any, memory: dict[str, Tensor], dropout: nn.Dropout, x: Tensor) -> Any:
    if is_disabled():
        return right(dropout, x)
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        state = memory.setdefault("state", torch.get_rng_state())
        torch.set_rng_state(state)
        return right(dropout, x)


_num_items_unheeded = in_head(lambda how: replace(how, num_items=(how.target != how.ignore_index).sum().clamp(min=1)))


def _replaced_reading(wrong: Callable[..., Any]) -> Planting:
    return replaced_by(FusedBlock, "fused_norm_read", wrong)


_ROWS_OF_CHUNK = 16

_IN_LOSSES: tuple[tuple[Any, ...], ...] = (
    ("size", "the loss is .3 % too large", in_losses(_edited(0, lambda losses: losses * 1.003))),
    ("nan", "NaN becomes 0", in_losses(_edited(0, lambda losses: losses.nan_to_num(0.0)))),
    ("no-grad", "wrong where no gradient is wanted", in_losses(_losses_wrong_without_gradients)),
    ("in-place", "the input is written over", in_losses(_writes_over_its_rows)),
    ("dx-size", "the gradient of the input is 1 % too small", in_losses(_edited(1, lambda dx: dx * 0.99))),
    ("dw-size", "the gradient of the weight is 1 % too large", in_losses(_edited(2, lambda dw: dw * 1.01))),
    ("dw", "the gradient of the weight is zero", in_losses(_edited(2, torch.zeros_like))),
    ("dbias", "the gradient of the bias is zero", in_losses(_edited(3, torch.zeros_like)), "no head has a bias"),
    ("frozen", "dx is wrong where the weight is frozen", in_losses(_dx_where_the_head_is_frozen)),
    ("few", "the last row of a chunk is left out", in_losses(_all_but_chunk_ends)),
    ("many", "dw has the last row of a chunk twice", in_losses(_chunk_ends_twice)),
    ("dw-chunks", "dw is rounded once for each chunk", in_losses(_rounded_by_chunk)),
    ("ignored", "rows without a label have one", in_losses(_ignored_rows_counted)),
    ("mean", "rows without a label count in a mean", replaced_by(linear_cross_entropy, "_divisor", _rows_in_the_mean)),
    (
        "divided-late",
        "gradients are divided by the number of labels after their rounding",
        in_losses(_scaled_after_rounding),
    ),
    ("neighbour", "the gradient is that of the label of the row before", in_losses(_gradient_of_a_neighbours_label)),
    (
        "square",
        "the slope of the cap without its square",
        in_losses(_slope_of_cap_without_its_square),
        "no logits are capped",
    ),
    ("unshifted", "labels are not shifted", in_head(lambda how: replace(how, target=how.target.roll(1)))),
    ("num-items", "the number of labels that a step has is not heeded", _num_items_unheeded),
)
"""Faults of heads with their losses: the name, what is wrong, the fault, and why it may be hidden."""

_IN_RECOMPUTATION: tuple[tuple[str, str, Planting], ...] = (
    ("attention", "attention keeps what its linears make, in silence", recomputes_as({"attention": "mlp"})),
    ("no-linears", "outputs of no linear are recomputed", recomputes_as({"mlp": True, "attention": True})),
    ("one-layer", "one layer keeps all", replaced_by(fused_classes, "call_recomputing", _not_in_the_first_layer)),
    ("held", "outputs that are recomputed are held as well", replaced_by(_Recomputed, "saved_as", _held_for_ever)),
    ("freed", "what was recomputed is never freed", replaced_by(_Recomputed, "take", _never_freed)),
    ("head", "logits are real in silence", replaced_by(losses, "_why_real", lambda *_: "")),
)
"""Faults in what a level of ``recompute`` saves, which changes no number: the name, what is wrong, and the fault."""

_IN_LAZY_LOGITS: tuple[tuple[Any, ...], ...] = (
    ("batch", "logits that are read are those of the latest batch", logits_of_the_latest_batch, ROUNDINGS),
    ("graph", "logits that are read have no gradient", replaced_by(LazyLogits, "read", _cut_from_the_graph), ROUNDINGS),
)
"""Faults of logits that are computed when they are read, as ``_IN_LOSSES``."""

_IN_SUMS: tuple[tuple[Any, ...], ...] = (
    ("order", "gradients are added up from the first reader on", _FOR_READERS, _of_readers(lambda dys: dys[::-1])),
    ("early", "sums of fp32 gradients are rounded to 16 bits", _FOR_READERS, _of_readers(lambda dys: reduce(add, dys))),
    (
        "late",
        "sums of 16-bit gradients are not rounded",
        _FOR_READERS,
        _of_readers(lambda dys: reduce(add, [dy.float() for dy in dys])),
    ),
    ("ds-joined", "the residual's gradient joins before a rounding", _FOR_READERS[:1], _residual_before_rounding),
)
"""Faults in the roundings of a sum of gradients that flow into a norm which knows its readers, as ``_IN_BACKWARDS``."""

_AMONG_READERS: tuple[tuple[Any, ...], ...] = (
    ("input", "a linear reads the norm's input", fused_block, "for_readers", _last_reads_the_input),
    ("neighbour", "a linear reads the norm before", fused_block, "for_readers", _last_reads_the_norm_before),
    ("detached", "the input that is handed on has no gradient", FusedBlock, "fused_norm_read", _detached_input),
)
"""Faults in who reads what: the name, what is wrong, the function and its owner, and what is called instead."""

_IN_ADAPTERS: tuple[tuple[Any, ...], ...] = (
    (
        "dbase",
        "the linear's output has no gradient",
        "lora",
        replaced_by(LORA_ADD, "gradients_by", _no_gradient_of_base),
    ),
    ("fallback", "runs stock code in silence", "lora-alone", falls_back(LORA_ADD)),
    (
        "dropout-cast",
        "the input is not cast although some of it is dropped",
        "lora-dropout",
        replaced_by(FusedAdapter, "_cast_for_adapter", _not_cast),
    ),
    ("dropout-none", "nothing is dropped", "lora-dropout", replaced_by(nn.Dropout, "forward", _nothing_dropped)),
    (
        "dropout-same",
        "what is dropped is the same in all adapters",
        "lora-dropout",
        replaced_by(nn.Dropout, "forward", _dropped_as_in_the_first),
    ),
    (
        "shared",
        "an adapter reads another one's output of a norm",
        "lora-alone",
        replaced_by(linear_inputs, "keep_for_adapter", _adapter_shares_another_ones),
        ROUNDINGS,
    ),
)
"""Faults of adapters: the name, what is wrong, the execution, the fault, and why it may be hidden."""

_IN_FORWARDS: tuple[tuple[Any, ...], ...] = (
    ("casting", "x_hat is rounded elsewhere than stock rounds it", _NORMED, _other_casting, _16_BITS),
    ("centering", "the + 1 of gamma is missing, or one too many", _NORMED, _other_centering),
    ("eps", "eps is ten times too large", _NORMED, _larger_eps, "eps all but vanishes in a rounding"),
    ("size", "y is .3 % too large", _EVERY, _too_large),
    ("last-row", "the last row is that before it", _EVERY, _last_row_copied),
    ("nan", "NaN becomes 0", _EVERY, _nan_to_zero),
    ("no-grad", "wrong where no gradient is wanted", _EVERY, _wrong_without_gradients),
    ("shape", "a second, smaller shape loses a row", _EVERY, _rows_of_the_first_call),
    ("in-place", "the input is written over", _EVERY, _writes_over_its_branch),
    ("unrounded", "the sum is normalised before it is rounded", _NORM_OF_SUM, _normed_before_rounded, _16_BITS),
    ("stream", "an fp32 sum is rounded to bf16", _SUMMED, _narrow_stream, "no sum is in fp32"),
    ("residual", "the residual never arrives in the sum", _SUMMED, _no_residual),
    ("scale", "the branch is not scaled", (ADD_RMS_NORM,), _no_scale, "no branch is scaled"),
    ("rotation", "rotated the wrong way", _ROTATED, _rotated_the_other_way),
    ("position", "rotated by a neighbour's angles from position 32 on", _ROTATED, _rotated_by_a_neighbour),
    ("half", "the first half is rotated the wrong way", (ROPE,), _half_of_it_rotated_the_other_way),
    ("unrounded", "the activation is not rounded before the product", (GLU,), _activation_unrounded, _16_BITS),
    ("activation", "another activation", (GLU,), _other_activation),
    ("packed", "all sequences are rotated by the first one's angles", _ROTATED, _rotated_as_the_first_sequence),
    ("end", "the end is lost where sizes are multiples of 1024", (GLU,), _without_its_end),
    ("even", "the last of an even number of rows is lost", _EVERY, _last_of_an_even_number_lost),
    ("factors", "a and b are cut off, not rounded", (LORA_ADD,), _factors_cut_off, "the adapter is in 16 bits"),
    ("cut", "the input is cut off, not rounded", (LORA_ADD,), _input_cut_off),
    ("products", "the products are not rounded", (LORA_ADD,), _products_unrounded),
    ("scale", "the scale is applied twice", (LORA_ADD,), _scaled_twice),
    ("rank", "the last of the rank is lost", (LORA_ADD,), _last_of_the_rank_lost),
    ("base", "the linear's output is left out", (LORA_ADD,), _adapter_without_base),
    ("copy", "the copy in 16 bits is cut off, not rounded", _FOR_READERS, _copy_cut_off, "nothing is copied"),
)
"""Forms of faults in forwards: the name, what is wrong, the operators, the wrong forward, and why it may be hidden."""

_IN_BACKWARDS: tuple[tuple[Any, ...], ...] = (
    ("back", "the gradient is rotated on instead of back", (ROPE,), _turned_on),
    ("dh", "the gradient between the products lacks the scale", (LORA_ADD,), _scale_left_out),
    ("shifted", "the gradient of b is of other rows", (LORA_ADD,), _rows_of_a_neighbour),
    ("dgate", "the gradient of the gate is .3 % too large", (GLU,), _times(1.003, "dgate")),
    ("square", "a slope without its square term", (GLU,), _slope_without_its_square, "no GELU by tanh"),
    ("swapped", "the gradients of gate and up are swapped", (GLU,), _gradients_swapped),
    ("dx-size", "the gradient of the input is 1 % too small", _EVERY_BACKWARD, _times(0.99, *_INPUTS)),
    ("dx-cut", "the gradient of the input is cut off, not rounded", _EVERY_BACKWARD, _gradients_cut_off, _16_BITS),
    (
        "dr-stream",
        "the gradient of an fp32 stream is rounded to bf16",
        _WITH_WEIGHTS[:3],
        _narrow_gradient_of_stream,
        "no stream is in fp32",
    ),
    ("dw-size", "the gradient of a weight is 1 % too large", _WITH_WEIGHTS, _times(1.01, *WEIGHTS)),
    ("dw", "the gradient of a weight is zero", _WITH_WEIGHTS, _times(0.0, *WEIGHTS)),
    ("dw-tile", "dw lacks the last eight rows", _WITH_WEIGHTS, _without_rows(lambda rows: 8)),
    ("dw-share", "dw lacks a quarter of the rows", _WITH_WEIGHTS, _without_rows(lambda rows: rows // 4)),
    ("frozen", "dx is wrong where the weight is frozen", _WITH_WEIGHTS, _dx_where_the_weight_is_frozen),
    ("dropped", "the gradient of the first reader is missing", _FOR_READERS, _of_readers(lambda dys: dys[:-1])),
    ("doubled", "that of the last reader counts twice", _FOR_READERS, _of_readers(lambda dys: (2 * dys[0], *dys[1:]))),
    ("ds", "the gradient of the residual is missing", _FOR_READERS, _residual_times(0.0)),
    ("ds-twice", "the gradient of the residual counts twice", _FOR_READERS, _residual_times(2.0)),
    ("ds-in-place", "a gradient handed to it is written over", _EVERY_BACKWARD, _writes_over_a_gradient),
)


def _faults() -> Iterator[Fault]:
    for planting, forms in ((in_forward, _IN_FORWARDS), (in_backward, _IN_BACKWARDS)):
        for name, what, operators, wrong, *hidden in forms:
            for operator in operators:
                where = "lora" if operator is LORA_ADD else "eager"
                yield Fault(f"{operator.name}-{name}", what, planting(operator, wrong), *hidden, where=where)

    for name, what, wrong in (
        ("columns", "codes have the scales of columns, not of rows", _scales_of_columns),
        ("stale", "the scale is that of the first call", _scale_of_the_first_call),
        ("unsaturated", "values beyond the largest code become NaN", _not_saturated),
    ):
        yield Fault(f"{NORM_FP8.name}-{name}", what, in_forward(NORM_FP8, wrong), where="fp8")

    for operator in (RMS_NORM, ADD_RMS_NORM):
        what = "the gradient of a weight is 1 % too large in compiled code"
        yield Fault(f"{operator.name}-compiled-dw", what, in_compiled_backward(operator), where="compile")
    for operator in _IN_MODELS:
        what = "y is .3 % too large in a checkpoint's second run"
        planted = in_forward(operator, _too_large_in_a_backward)
        yield Fault(f"{operator.name}-checkpointed", what, planted, where="checkpointing")
    for name, what, operators, wrong in _IN_SUMS:
        for operator in operators:
            yield Fault(f"{operator.name}-{name}", what, in_backward(operator, wrong), ROUNDINGS, "readers")
    for name, what, owner, function, wrong in _AMONG_READERS:
        yield Fault(f"readers-{name}", what, replaced_by(owner, function, wrong), where="readers")
    for name, what, where, planted, *hidden in _IN_ADAPTERS:
        yield Fault(f"adapter-{name}", what, planted, *hidden, where=where)
    for what_has_it, faults in ((LINEAR_CROSS_ENTROPY.name, _IN_LOSSES), ("lazy_logits", _IN_LAZY_LOGITS)):
        for name, what, planted, *hidden in faults:
            yield Fault(f"{what_has_it}-{name}", what, planted, *hidden, where="loss")
    yield Fault("recomputed-size", "what is recomputed is .3 % too large", recomputed_wrong, where="recompute")
    what = "outputs of linears are .3 % too large where they are recomputed"
    yield Fault("recomputed-linears", what, linears_recomputed_wrong, where="recompute")
    yield Fault("recomputed-never", "nothing is recomputed, in silence", never_recomputes, where="recompute")
    for name, what, planted in _IN_RECOMPUTATION:
        yield Fault(f"recomputed-{name}", what, planted, where="recompute")
    what = "outputs of LoRA layers are kept, in silence"
    yield Fault("recomputed-adapters", what, adapters_not_recomputed, where="lora-recompute")
    one_row = falls_back(*_IN_MODELS, where=_trains_one_sequence)
    for name, what, planted in (
        ("fallback-rotated", "runs its parts in silence", falls_back(QK_NORM, ROPE, GLU)),
        ("fallback-sandwich", "runs its parts in silence", falls_back(NORM_ADD_NORM)),
        ("fallback-onto", "runs its parts in silence", falls_back(NORM_ADD)),
        ("fallback-head", "logits are real in silence", replaced_by(losses, "_why_real", lambda *_: "")),
        ("fallback-one-row", "runs stock code for one sequence with gradients", one_row),
        ("readers-none", "linears read one tensor in silence", replaced_by(fused_block, "wanted_by", _none_is_wanted)),
        ("readers-unjoined", "a residual's gradient is added by autograd", _replaced_reading(_not_joined)),
        ("readers-past", "the residual connection reads past the norm", _replaced_reading(_handed_on_past_the_norm)),
        (
            "fallback-counted",
            "the loss of a step whose labels are counted reads logits",
            replaced_by(LossCall, "_loss", _loss_of_real_logits),
        ),
        (
            "readers-wide",
            "norms write float32 for linears that read 16 bits",
            never_answers(linear_inputs, "_are_cast"),
        ),
        ("attention-wide", "queries are written in float32", never_answers(FusedBlock, "fused_norm_read_dtype")),
        ("num-items-unheeded", "the number of labels in a step is not heeded", _num_items_unheeded),
        ("left-stock", "one block has its stock class, and the report says fused", left_stock),
    ):
        yield Fault(name, what, planted, where="sites")


FAULTS: Mapping[str, Fault] = MappingProxyType({fault.name: fault for fault in _faults()})
