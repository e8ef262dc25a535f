"""The verdict on a fused run, red or green, as a pure function of run records.

A fused run may leave its stock run by ``multiple`` times what the worst control does, and ``floor`` roundings are
granted besides, because a control can be lucky. Both were measured in 105 comparisons of an earlier suite (seven
families, three precisions, five seeds; Triton's interpreter): no number was off by more than 2.9 times the worst of
four controls, nor by more than 1.4 times once the floor is taken off. Of 132 controls on an H200, held in turn to the
other three as if they were fused, two are red: of a Qwen3-MoE, whose router decides near ties one way or the other, and
of a Mistral in fp32, its loss by 1.17 of the bound. Fused calls are held to bars of their own, whatever controls do.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from ..check.against_stock import CALL_LIMITS, CallRecord
from .comparison import FROZEN_NORMS, PRECISIONS, Comparison
from .training import RunRecord

Status = Literal["green", "red", "invalid"]

FIRST_STEPS = 3
FIRST_STEPS_BAR = 1e-6
"""The relative distance that the losses of the first steps may have from the stock run's in fp32, if the noise is less.
A loss itself has a rounding of 6e-8, and the steps in which a difference has had no time to grow are few."""

NOISE_CAPS: Mapping[str, Mapping[str, float]] = {
    "fp32": {"outputs": 1e-5, "gradients": 1e-4},
    "mixed": {"outputs": 0.05, "gradients": 0.1},
    "bf16": {"outputs": 0.05, "gradients": 0.1},
}
"""The relative noise, in the median place, beyond which a comparison says nothing, by precision and measure. In 57
comparisons on an H200 it was 4e-6 and 3e-5 at most in fp32, .007 and .013 in the others."""

MULTIPLE = 3.0
"""The multiple of the noise floor that a fused run may be off; 2.9 at most was measured."""


@dataclass(frozen=True)
class Measure:
    """A quantity that is compared, in one number or one for each of many places.

    Attributes:
        name: the field of ``RunRecord``, that of ``CallRecord`` behind ``call_``, or one of a whole run.
        head: of its column in tables, and of its row in charts.
        what: it is, in words.
        bar: what it may be, whatever the controls do; None for one that is held to the noise.
        why: that bar, or that floor.
        floor: what is granted besides ``MULTIPLE`` times the noise, in roundings (half an eps) of the precision.
    """

    name: str
    head: str
    what: str
    bar: float | None = None
    why: str = ""
    floor: float = 0.0


def _to_a_last_place(name: str, head: str, what: str) -> Measure:
    why = "A last place is two roundings: a control can happen to hit the stock number and the fused run not."
    return Measure(name, head, what, floor=2, why=why)


def _of_call(name: str) -> Measure:
    return Measure(f"call_{name}", *CALL_LIMITS[name])


# In the order in which a step computes them, which is that in which a divergence spreads.
MEASURES: tuple[Measure, ...] = (
    Measure("first_losses", "first losses", f"largest relative gap of the first {FIRST_STEPS} losses"),
    _to_a_last_place("outputs", "layer", "output of a layer at the initial weights, relative distance"),
    *map(_of_call, ("outputs", "rows", "losses", "changes", "bits")),
    _to_a_last_place("output_gradients", "layer, grad", "gradient of a layer's output, relative distance"),
    *map(_of_call, ("gradients", "slopes", "turned")),
    _to_a_last_place(
        "output_gradient_slopes", "layer, slope", "slope of a layer's output gradient over stock's, less one"
    ),
    _to_a_last_place("gradients", "weight, grad", "gradient of a parameter in the first step, relative distance"),
    _to_a_last_place(
        "gradient_slopes", "weight, slope", "slope of a parameter's first gradient over stock's, less one"
    ),
    Measure(
        "loss",
        "loss",
        "rms over steps, and the evaluation after them, of the loss's relative gap",
        floor=0.25,
        why="Losses: means over tokens, whose roundings cancel; never less than the last place of an fp32.",
    ),
    _to_a_last_place("gradient_norm", "gradient norm", "median over steps of the gradient norm's relative gap"),
    Measure(
        "drifts",
        "weight, drift",
        "distance of a parameter at the end, relative to its drift",
        floor=0.5,
        why="Drifts: here a rounding is that of every weight, over the way it went: each step rounds the weights anew.",
    ),
)
BY_NAME: Mapping[str, Measure] = {measure.name: measure for measure in MEASURES}


@dataclass(frozen=True)
class BoundCheck:
    """One number held to its bound.

    Attributes:
        measure: name of it.
        where: layer, norm or parameter; empty for a number of the whole run.
        value: the fused run's.
        noise: the controls'.
        bound: what ``value`` may be.
    """

    measure: str
    where: str
    value: float
    noise: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.value <= self.bound

    @property
    def share(self) -> float:
        """The share of the bound that is taken; infinite for what is not a number."""
        if math.isnan(self.value) or (self.value and not self.bound):
            return math.inf
        return self.value / self.bound if self.bound else 0.0


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison.

    Attributes:
        status: ``green``, ``red``, or ``invalid`` for a comparison that says nothing.
        reasons: why it is not green, in words.
        checks: all of them.
        divergence: the layer in which a red run leaves the stock run first, and where in it; None if no layer does.
    """

    status: Status
    reasons: tuple[str, ...]
    checks: tuple[BoundCheck, ...]
    divergence: str | None = None

    @property
    def is_red_by_noise(self) -> bool:
        """True if the run is red, and each number that makes it so is held to the controls, not to a bar of its own."""
        failed = [check for check in self.checks if not check.ok]
        return bool(failed) and all(BY_NAME[check.measure].bar is None for check in failed)

    def worst(self, measure: str | None = None) -> BoundCheck | None:
        """The check, of this measure or of all, that takes most of its bound."""
        mine = [check for check in self.checks if measure in (None, check.measure)]
        return max(mine, key=lambda check: check.share, default=None)


@dataclass(frozen=True)
class ComparisonResult:
    """One comparison after its runs.

    Attributes:
        comparison: what was compared.
        stock, controls, fused: the runs as numbers; None and empty if they were not made.
        calls: how far the fused calls are from the stock modules.
        error: why the comparison could not be made.
    """

    comparison: Comparison
    stock: RunRecord | None = None
    controls: tuple[RunRecord, ...] = ()
    fused: RunRecord | None = None
    calls: CallRecord | None = None
    error: str | None = None

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict on the fused run and its calls."""
        if self.stock is None or (self.fused is None and self.calls is None):
            return Verdict("invalid", (self.error or "not run",), ())
        precision, execution = self.comparison.precision, self.comparison.execution
        return judge(precision, self.stock, self.controls, self.fused, self.calls, execution=execution)


def judge(
    precision: str,
    stock: RunRecord,
    controls: Sequence[RunRecord],
    fused: RunRecord | None,
    calls: CallRecord | None = None,
    *,
    execution: str = "eager",
) -> Verdict:
    """The verdict on a fused run, on its calls, or on both, from the stock run and harmlessly perturbed ones.

    ``precision``: a key of ``PRECISIONS``. ``execution``: how the steps ran, one of ``EXECUTIONS``.
    """
    if reasons := tuple(_invalid(NOISE_CAPS[precision], stock, controls, calls, execution)):
        return Verdict("invalid", reasons, ())
    if fused is not None and not fused.finite:
        step = len(fused.losses) - 1
        return Verdict("red", (f"the fused run is not finite in step {step}, and the stock run is",), ())
    checks = tuple(_checks(precision, stock, controls, fused, calls))
    failed = [check for check in checks if not check.ok]
    if not failed:
        return Verdict("green", (), checks)
    return Verdict("red", tuple(_reasons(failed)), checks, _divergence(failed, list(stock.outputs)))


def _invalid(
    caps: Mapping[str, float], stock: RunRecord, controls: Sequence[RunRecord], calls: CallRecord | None, execution: str
) -> Iterator[str]:
    """The reasons for which a comparison says nothing."""
    for name, run in (("stock", stock), *((f"control {index}", run) for index, run in enumerate(controls))):
        if not run.finite:
            yield f"the {name} run is not finite in step {len(run.losses) - 1}: lower the learning rate"
            return
    if not controls:
        yield "no control run, so no noise floor"
    if execution not in FROZEN_NORMS and not stock.moved:
        yield "no norm weight is trained"
    if stock.constant:
        yield f"{_some(stock.constant)} started as one number throughout, which hides wrong casts"
    if still := [name for name, moved in stock.moved.items() if not moved]:
        yield f"{_some(still)} never moved: take more steps or a higher learning rate"
    if calls is not None and calls.not_seen:
        yield f"{_some(calls.not_seen, 'sites')} ran as stock code does, and the report says otherwise"
    for what, places in calls.not_done.items() if calls is not None else ():
        yield f"{_some(places, 'places')}: {what}"
    for measure, cap in caps.items():
        values = [_values(measure, control, stock) for control in controls]
        floors = noise_floor(values).values() if values else ()
        if floors and (noise := statistics.median(floors)) > cap:
            off = f"{noise:.1e} off in the median ({BY_NAME[measure].what}), more than {cap:.1e}"
            yield f"the controls themselves are {off}: a fault could hide in that"
    for index, control in enumerate(controls):
        distances = [value for measure in MEASURES for value in getattr(control, measure.name, {}).values()]
        has_same_steps = (control.losses, control.gradient_norms) == (stock.losses, stock.gradient_norms)
        if has_same_steps and not any(distances):
            yield f"control {index} is the stock run to the last bit: its perturbation did nothing"


def _checks(
    precision: str, stock: RunRecord, controls: Sequence[RunRecord], fused: RunRecord | None, calls: CallRecord | None
) -> Iterator[BoundCheck]:
    for measure in MEASURES if calls is not None else ():
        if measure.bar is not None:
            values = getattr(calls, measure.name.removeprefix("call_"))
            yield from (BoundCheck(measure.name, where, value, 0.0, measure.bar) for where, value in values.items())
    if fused is None:
        return
    rounding = torch.finfo(getattr(torch, PRECISIONS[precision].activations)).eps / 2
    if precision == "fp32":
        first = relative_gaps(fused.losses, stock.losses)[:FIRST_STEPS]
        noise = max(max(relative_gaps(control.losses, stock.losses)[:FIRST_STEPS]) for control in controls)
        yield BoundCheck("first_losses", "", max(first), noise, max(FIRST_STEPS_BAR, MULTIPLE * noise))
    for measure in MEASURES:
        if measure.bar is not None or measure.name == "first_losses":
            continue
        floors = noise_floor([_values(measure.name, control, stock) for control in controls])
        for where, value in _values(measure.name, fused, stock).items():
            noise = floors.get(where, 0.0)
            own = stock.drift_roundings.get(where, rounding) if measure.name == "drifts" else rounding
            # A loss is an fp32 in every precision, and may be off by its last place.
            least = torch.finfo(torch.float32).eps if measure.name == "loss" else 0.0
            yield BoundCheck(measure.name, where, value, noise, MULTIPLE * noise + max(measure.floor * own, least))


def noise_floor(controls: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The noise in each place: that of the worst control there, or in the median place if that is more.

    A place with few numbers can come out alike by luck in all controls; the median place cannot.
    """
    worst = {where: max(control[where] for control in controls) for where in controls[0]}
    typical = statistics.median(worst.values()) if worst else 0.0
    return {where: max(value, typical) for where, value in worst.items()}


def _values(measure: str, run: RunRecord, stock: RunRecord) -> Mapping[str, float]:
    """A run's numbers of one measure, by place; the place of those of a whole run has no name."""
    if measure == "loss":
        gaps = relative_gaps([*run.losses, run.evaluation_loss], [*stock.losses, stock.evaluation_loss])
        return {"": math.sqrt(sum(gap * gap for gap in gaps) / len(gaps))}
    if measure == "gradient_norm":  # the median, because the largest gap is that of a spike, a matter of luck
        return {"": statistics.median(relative_gaps(run.gradient_norms, stock.gradient_norms))}
    return getattr(run, measure)


def relative_gaps(run: Sequence[float], other: Sequence[float]) -> list[float]:
    """The gap between two runs in each step that both have, relative to ``other``."""
    return [abs(a - b) / (abs(b) or 1.0) for a, b in zip(run, other, strict=False)]


def _reasons(failed: Sequence[BoundCheck]) -> Iterator[str]:
    for measure in dict.fromkeys(check.measure for check in failed):
        mine = [check for check in failed if check.measure == measure]
        worst = max(mine, key=lambda check: check.share)
        more = f" and {len(mine) - 1} more" if len(mine) > 1 else ""
        where = f" at {worst.where}{more}" if worst.where else ""
        yield f"{BY_NAME[measure].what}: {worst.value:.1e}{where}, bound {worst.bound:.1e}"


def _divergence(failed: Sequence[BoundCheck], outputs: list[str]) -> str | None:
    """The layer where a red run leaves the stock run first: forward through the layers, then backward through them.

    A gradient that is wrong as it leaves a layer's output was made wrong in what comes after that output.
    """

    def position(where: str) -> int:
        layer = _layer(where)
        return outputs.index(layer) if layer in outputs else -1 if "embed" in where else len(outputs)

    def places(*measures: str) -> list[str]:
        return [check.where for name in measures for check in failed if check.measure == name]

    if forward := places("call_outputs", "call_rows", "call_losses", "outputs"):
        where = min(forward, key=position)
        return f"{_layer(where)}, forward: {where}"
    backward = [
        (outputs[min(outputs.index(where) + 1, len(outputs) - 1)], f"gradient of {where}")
        for where in places("output_gradients", "output_gradient_slopes")
    ]
    later = places("call_changes", "call_bits", "call_gradients", "call_turned", "call_slopes", "gradients")
    backward += [(where, where) for where in later + places("gradient_slopes")]
    if backward := backward or [(where, where) for where in places("drifts")]:
        where, what = max(backward, key=lambda place: position(place[0]))
        return f"{_layer(where)}, backward: {what}"
    return None


def _layer(where: str) -> str:
    match = re.match(r".*?\.\d+(?=\.|$)", where)
    return match[0] if match else where


def _some(names: Sequence[str], what: str = "norm weights") -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} other {what}"
