"""A training run as it is kept: as tensors while it is compared with the stock run, as numbers afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor, nn

from ..check.distances import distances, ratio, slope_errors
from .training import TrainingResult

TRIM = 0.01
"""The share of the weights, those furthest apart, that is left out of a drift. AdamW moves a weight by the sign of its
gradient, more or less. If the gradient is all but zero the sign is luck, and a few such weights would be all that a
distance is made of. A wrong kernel moves more than a hundredth of them."""


@dataclass(frozen=True)
class RunTensors(TrainingResult):
    """One run with its tensors, which are on the CPU.

    Attributes:
        outputs: of each layer and of the model, for one micro-batch at the initial weights, in the order they run in.
        output_gradients: of the loss with respect to them.
        gradients: of each trained parameter in the first step, before clipping.
        initial: the trained parameters before the first step.
        final: the same after the last.
        rounding: half an eps of the parameters.
        norm_weights: names of the trained norm weights.
        sites: how many sites of each kind were fused, and how many blocks read norms by outputs of their own.
        not_seen: fused sites, with their kinds, that ran stock code in the first micro-batch, or that compiled code has
            no operator for.
    """

    outputs: Mapping[str, Tensor]
    output_gradients: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    initial: Mapping[str, Tensor]
    final: Mapping[str, Tensor]
    rounding: float
    norm_weights: tuple[str, ...]
    sites: Mapping[str, int]
    not_seen: tuple[str, ...]


@dataclass(frozen=True)
class RunRecord(TrainingResult):
    """One run as numbers: its losses and costs, and how far it was from the stock run.

    Attributes:
        sites: how many sites of each kind were fused, and how many blocks read norms by outputs of their own.
        moved: how far each norm weight went from its start, relative to its size; 0 for one that did not move.
        constant: norm weights that started as one number throughout, which hides a wrong cast.
        outputs, output_gradients, gradients: relative distances from the stock run's.
        output_gradient_slopes, gradient_slopes: how far from one the slope is of a line through them over the stock
            run's: what they have in common, which a distance does not see among roundings.
        drifts: distance of the final parameters from the stock run's, relative to how far those had moved, the share
            ``TRIM`` that is farthest apart, and ``TRIMMED`` numbers at least, left out.
        drift_roundings: how far a parameter drifts by one rounding of each weight: half an eps of its size over how far
            it moved.
    """

    sites: Mapping[str, int]
    moved: Mapping[str, float]
    constant: tuple[str, ...] = ()
    outputs: Mapping[str, float] = field(default_factory=dict)
    output_gradients: Mapping[str, float] = field(default_factory=dict)
    gradients: Mapping[str, float] = field(default_factory=dict)
    output_gradient_slopes: Mapping[str, float] = field(default_factory=dict)
    gradient_slopes: Mapping[str, float] = field(default_factory=dict)
    drifts: Mapping[str, float] = field(default_factory=dict)
    drift_roundings: Mapping[str, float] = field(default_factory=dict)


def record_run(run: RunTensors, stock: RunTensors) -> RunRecord:
    """The numbers of a run, compared with those of the stock run, which may be the same."""
    stock_drifts = {name: value - stock.initial[name] for name, value in stock.final.items()}
    drifts = {name: value - stock.initial[name] for name, value in run.final.items()}
    return RunRecord(
        **{each.name: getattr(run, each.name) for each in fields(TrainingResult)},
        sites=run.sites,
        moved={
            name: ratio((run.final[name] - run.initial[name]).norm().item(), run.initial[name].norm().item())
            for name in run.norm_weights
        },
        constant=tuple(name for name in run.norm_weights if run.initial[name].unique().numel() == 1),
        outputs=distances(run.outputs, stock.outputs),
        output_gradients=distances(run.output_gradients, stock.output_gradients),
        gradients=distances(run.gradients, stock.gradients),
        output_gradient_slopes=slope_errors(run.output_gradients, stock.output_gradients),
        gradient_slopes=slope_errors(run.gradients, stock.gradients),
        drifts=distances(drifts, stock_drifts, trim=TRIM),
        drift_roundings={
            name: ratio(run.rounding * run.initial[name].norm().item(), way.norm().item())
            for name, way in drifts.items()
            if way.any()
        },
    )


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters that are trained, under the names they have without wrappers."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name.removeprefix("module."), parameter


def snapshot(tensor: Tensor) -> Tensor:
    """A copy on the CPU in fp32, of the whole of a sharded tensor; every process has to ask for it."""
    whole = getattr(tensor, "full_tensor", lambda: tensor)()
    return whole.detach().to("cpu", torch.float32, copy=True)
