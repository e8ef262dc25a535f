"""A training run as it is kept: as tensors while it is compared with its stock twin, as numbers afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

ZERO_SHARE = 1e-3
"""A tensor that is zero in exact arithmetic, such as the gradient of a bias on the keys, has no relative distance. Each
counts as at least this share of the rms of its kind."""

TRIM = 0.01
"""AdamW moves a weight by the sign of its gradient, more or less. Where the gradient is all but zero the sign is luck,
and a few such weights would be all that a distance is made of. A wrong kernel moves more than a hundredth of them."""


@dataclass(frozen=True)
class NormRerun:
    """One norm called again on the input and the gradient that it had in the stock run.

    Attributes:
        x: [..., N], its input in the stock run, a few rows of it.
        dy: like its output, the gradient of that.
        y: what it returns now.
        dx: gradient of the input.
        dw: gradient of the weight; None where there is none.
        overwritten: share of the elements of ``dy`` that its backward changed, though they may be somebody else's.
        made_by: the autograd node behind ``y``, which tells stock code from other code.
    """

    x: Tensor
    dy: Tensor
    y: Tensor
    dx: Tensor
    dw: Tensor | None
    overwritten: float
    made_by: str


@dataclass(frozen=True)
class RunTensors:
    """One run with its tensors, which are on the CPU.

    Attributes:
        losses: of each step.
        gradient_norms: of each step, before clipping.
        seconds_per_step: median.
        memory_bytes: as in ``TrainingResult``.
        outputs: of each layer and of the model, for one micro-batch at the initial weights, in the order they run in.
        output_gradients: of the loss with respect to them.
        reruns: of each norm.
        gradients: of each trained parameter in the first step, before clipping.
        initial: the trained parameters before the first step.
        final: the same after the last.
        rounding: half an eps of the parameters.
        norm_weights: names of the trained norm weights.
        sites: how many sites of each kind were fused.
    """

    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    seconds_per_step: float
    memory_bytes: int
    outputs: Mapping[str, Tensor]
    output_gradients: Mapping[str, Tensor]
    reruns: Mapping[str, NormRerun]
    gradients: Mapping[str, Tensor]
    initial: Mapping[str, Tensor]
    final: Mapping[str, Tensor]
    rounding: float
    norm_weights: tuple[str, ...] = ()
    sites: Mapping[str, int] = field(default_factory=dict)

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, self.losses + self.gradient_norms))


@dataclass(frozen=True)
class RunRecord:
    """One run as numbers: its losses and costs, and how far it was from the stock run.

    Attributes:
        losses, gradient_norms, seconds_per_step, memory_bytes, sites: as in ``RunTensors``.
        moved: how far each norm weight went from its start, relative to its size; 0 for one that did not move.
        constant: norm weights that started as one number throughout, which hides a wrong cast.
        outputs, output_gradients, gradients: relative distances from the stock run's.
        drifts: distance of the final parameters from the stock run's, relative to how far those had moved, the share
            ``TRIM`` that is farthest apart left out.
        norm_outputs, input_gradients, weight_gradients: relative distances of a norm's results, on equal inputs.
        bits: share of a norm's outputs that differ at all, where they have 16 bits or another dtype than stock's.
        overwritten: share of the gradient handed to a norm that its backward changed.
        roundings: half an eps of the coarser dtype of a norm's input and output.
        ran_stock_code: norms that ran the stock norm's code.
        drift_roundings: how far a parameter drifts by one rounding of each weight: half an eps of its size over how far
            it moved.
    """

    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    seconds_per_step: float
    memory_bytes: int
    sites: Mapping[str, int]
    moved: Mapping[str, float]
    constant: tuple[str, ...] = ()
    outputs: Mapping[str, float] = field(default_factory=dict)
    output_gradients: Mapping[str, float] = field(default_factory=dict)
    gradients: Mapping[str, float] = field(default_factory=dict)
    drifts: Mapping[str, float] = field(default_factory=dict)
    norm_outputs: Mapping[str, float] = field(default_factory=dict)
    bits: Mapping[str, float] = field(default_factory=dict)
    overwritten: Mapping[str, float] = field(default_factory=dict)
    roundings: Mapping[str, float] = field(default_factory=dict)
    ran_stock_code: tuple[str, ...] = ()
    drift_roundings: Mapping[str, float] = field(default_factory=dict)
    input_gradients: Mapping[str, float] = field(default_factory=dict)
    weight_gradients: Mapping[str, float] = field(default_factory=dict)

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, self.losses + self.gradient_norms))


def record_run(run: RunTensors, stock: RunTensors) -> RunRecord:
    """The numbers of a run, compared with those of the stock run, which may be the same."""
    stock_drifts = {name: value - stock.initial[name] for name, value in stock.final.items()}
    drifts = {name: value - stock.initial[name] for name, value in run.final.items()}
    reruns, stock_reruns = run.reruns, {path: stock.reruns[path] for path in run.reruns}
    weights = {path: (rerun.dw, stock_reruns[path].dw) for path, rerun in reruns.items()}
    return RunRecord(
        losses=run.losses,
        gradient_norms=run.gradient_norms,
        seconds_per_step=run.seconds_per_step,
        memory_bytes=run.memory_bytes,
        sites=run.sites,
        moved={
            name: _ratio((run.final[name] - run.initial[name]).norm().item(), run.initial[name].norm().item())
            for name in run.norm_weights
        },
        constant=tuple(name for name in run.norm_weights if run.initial[name].unique().numel() == 1),
        outputs=distances(run.outputs, stock.outputs),
        output_gradients=distances(run.output_gradients, stock.output_gradients),
        gradients=distances(run.gradients, stock.gradients),
        drifts=distances(drifts, stock_drifts, trim=TRIM),
        norm_outputs=_each_distance({path: (reruns[path].y, stock_reruns[path].y) for path in reruns}),
        bits={
            path: share_unequal(rerun.y, stock_reruns[path].y)
            for path, rerun in reruns.items()
            # The last bit of an fp32 hangs on the order of a sum.
            if rerun.y.dtype != torch.float32 or stock_reruns[path].y.dtype != torch.float32
        },
        overwritten={path: rerun.overwritten for path, rerun in reruns.items()},
        roundings={
            path: max(torch.finfo(rerun.x.dtype).eps, torch.finfo(rerun.y.dtype).eps) / 2
            for path, rerun in reruns.items()
        },
        ran_stock_code=tuple(path for path in reruns if reruns[path].made_by == stock_reruns[path].made_by),
        drift_roundings={
            name: _ratio(run.rounding * run.initial[name].norm().item(), way.norm().item())
            for name, way in drifts.items()
            if way.any()
        },
        input_gradients=_each_distance({path: (reruns[path].dx, stock_reruns[path].dx) for path in reruns}),
        weight_gradients=_each_distance(weights),
    )


def distances(one: Mapping[str, Tensor], other: Mapping[str, Tensor], *, trim: float = 0.0) -> dict[str, float]:
    """The norm of each difference over the norm of ``other``'s, which counts as at least ``ZERO_SHARE`` of the rms of
    all of them. Infinite where a tensor is not finite, or is missing on one side.

    Args:
        one: tensors by name.
        other: those they are compared with.
        trim: share of the elements that are left out of a difference, the largest of it.
    """
    squares = sum(value.double().square().sum().item() for value in other.values())
    rms = math.sqrt(squares / max(1, sum(value.numel() for value in other.values())))
    found = {}
    for name, truth in other.items():
        scale = max(truth.double().norm().item(), ZERO_SHARE * rms * truth.numel() ** 0.5)
        gap = _gap(one[name], truth, trim) if name in one else math.inf
        found[name] = _ratio(gap, scale)
    return found


def _gap(one: Tensor, other: Tensor, trim: float) -> float:
    apart = (one.double() - other.double()).abs().flatten()
    if trim and apart.isfinite().all():
        apart = apart.sort().values[: apart.numel() - math.ceil(trim * apart.numel())]
    return apart.norm().item()


def _each_distance(pairs: Mapping[str, tuple[Tensor | None, Tensor | None]]) -> dict[str, float]:
    return {
        path: _ratio((one.double() - other.double()).norm().item(), other.double().norm().item())
        for path, (one, other) in pairs.items()
        if one is not None and other is not None
    }


def share_unequal(one: Tensor, other: Tensor) -> float:
    """The share of elements that differ; all of them where the dtypes do."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return 1.0
    return (one != other).double().mean().item()


def _ratio(gap: float, scale: float) -> float:
    if not (math.isfinite(gap) and math.isfinite(scale)):
        return math.inf
    return gap / scale if scale else math.inf if gap else 0.0


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters that are trained, under the names they have without wrappers."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name.removeprefix("module."), parameter


def snapshot(tensor: Tensor) -> Tensor:
    """A copy on the CPU in fp32, of the whole of a sharded tensor; every process has to ask for it."""
    whole = getattr(tensor, "full_tensor", lambda: tensor)()
    return whole.detach().to("cpu", torch.float32, copy=True)
