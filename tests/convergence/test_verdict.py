"""A run within the noise is green, one that leaves it anywhere is red, a comparison that says nothing is invalid."""

import math
from dataclasses import replace

import pytest

from fused_norm.check.against_stock import CallRecord
from fused_norm.convergence.training import RunRecord
from fused_norm.convergence.verdict import MEASURES, judge

LAYERS = ("model.layers.0", "model.layers.1", "logits")
NORMS = ("model.layers.0.norm", "model.layers.1.norm", "model.norm")
PARAMETERS = ("model.embed_tokens.weight", "model.layers.0.norm.weight", "model.layers.1.norm.weight")
ROUNDING = 2.0**-8
PLACES = {
    "outputs": LAYERS,
    "output_gradients": LAYERS,
    "output_gradient_slopes": LAYERS,
    "gradients": PARAMETERS,
    "gradient_slopes": PARAMETERS,
    "drifts": PARAMETERS,
}


def run_record(level=0.0, *, losses=(5.0, 4.0, 3.0), norms=(1.0, 1.0, 2.0), **changes):
    """Return the record of a run with the same distance from stock at every place."""
    fields = {name: dict.fromkeys(places, level) for name, places in PLACES.items()}
    moved = dict.fromkeys(PARAMETERS[1:], 0.01)
    return RunRecord(losses, norms, 0.1, 1, losses[-1], {"norm": 3}, moved, **fields | changes)


STOCK = run_record()
CONTROL = run_record(1e-2, losses=(5.001, 4.0, 3.0), norms=(1.01, 1.01, 2.5))
CONTROLS = (CONTROL, run_record(0.5e-2, losses=(5.0, 4.0, 3.0001), norms=(1.0, 1.0, 2.1)))


CALL_BARS = {measure.name: measure.bar for measure in MEASURES if measure.bar is not None}
CALLS = CallRecord(*(dict.fromkeys(NORMS, 0.0) for _ in CALL_BARS))


def verdict(fused, precision="bf16", controls=CONTROLS, stock=STOCK, calls=CALLS, **options):
    return judge(precision, stock, controls, fused, calls, **options)


def test_a_run_that_is_as_far_off_as_the_controls_is_green():
    result = verdict(run_record(1e-2, losses=(5.001, 4.0, 3.0)))
    assert result.status == "green"
    assert not result.reasons
    assert {check.measure for check in result.checks} == {measure.name for measure in MEASURES} - {"first_losses"}


@pytest.mark.parametrize("name", PLACES)
def test_one_place_beyond_its_bound_is_red_and_named(name):
    places = PLACES[name]
    measure = next(measure for measure in MEASURES if measure.name == name)
    noise = 1e-2
    bound = 3 * noise + measure.floor * ROUNDING
    within, beyond = ({**dict.fromkeys(places, noise), places[1]: bound * share + tiny} for share, tiny in LIMITS)
    assert verdict(replace(CONTROL, **{name: within})).status == "green"
    result = verdict(replace(CONTROL, **{name: beyond}))
    assert result.status == "red"
    assert len(result.reasons) == 1
    assert places[1] in result.reasons[0]
    assert result.divergence.startswith("logits" if name.startswith("output_gradient") else "model.layers.")


LIMITS = ((0.99, 0.0), (1.01, 1e-9))


def test_losses_and_gradient_norms_are_held_to_the_controls():
    far = replace(CONTROL, losses=(5.001, 4.03, 3.0))
    assert "loss" in verdict(far).reasons[0]
    far = replace(CONTROL, evaluation_loss=3.1)
    assert "the evaluation after them" in verdict(far).reasons[0]
    # One step with a spike says nothing about gradients; half of the steps do.
    assert verdict(replace(CONTROL, gradient_norms=(1.0, 1.0, 99.0))).status == "green"
    assert "gradient norm" in verdict(replace(CONTROL, gradient_norms=(1.1, 1.1, 2.0))).reasons[0]


def test_the_first_losses_in_fp32_have_a_bar_of_their_own():
    calm = run_record(1e-7, losses=(5.0, 4.0, 3.0, 2.5))
    late_noise = run_record(1e-7, losses=(5.0, 4.0, 3.0, 2.1))
    stock = replace(STOCK, losses=(5.0, 4.0, 3.0, 2.0), evaluation_loss=2.5)
    early = run_record(1e-7, losses=(5.0 * (1 + 2e-6), 4.0, 3.0, 2.5))
    assert verdict(early, "fp32", (late_noise, calm), stock).status == "red"
    assert verdict(early, "bf16", (late_noise, calm), stock).status == "green"
    wild = run_record(1e-7, losses=(5.0 * (1 + 1e-6), 4.0, 3.0, 2.1))
    assert verdict(early, "fp32", (wild, calm), stock).status == "green"


@pytest.mark.parametrize(("measure", "bar"), CALL_BARS.items())
def test_fused_calls_are_held_to_the_stock_modules_whatever_the_controls_do(measure, bar):
    wild = replace(CONTROL, outputs=dict.fromkeys(LAYERS, 0.04))
    name = measure.removeprefix("call_")
    within, beyond = (replace(CALLS, **{name: {NORMS[1]: value}}) for value in (bar, bar * 1.01 + 1e-9))
    assert verdict(CONTROL, controls=(wild,), calls=within).status == "green"
    result = verdict(CONTROL, controls=(wild,), calls=beyond)
    assert result.status == "red"
    assert NORMS[1] in result.reasons[0]
    assert judge("bf16", STOCK, CONTROLS, None, beyond).status == "red"


@pytest.mark.parametrize(("precision", "level"), [("fp32", 1.01e-4), ("bf16", 0.101)])
def test_controls_that_are_far_off_themselves_judge_nothing(precision, level):
    wild = replace(CONTROL, gradients=dict.fromkeys(PARAMETERS, level), outputs=dict.fromkeys(LAYERS, 1e-7))
    result = verdict(CONTROL, precision, controls=(wild,))
    assert result.status == "invalid"
    assert "the controls themselves are" in result.reasons[0]
    one_place = replace(wild, gradients={**dict.fromkeys(PARAMETERS, 1e-7), PARAMETERS[0]: level})
    assert verdict(CONTROL, precision, controls=(one_place,)).status != "invalid"


def test_a_parameter_may_drift_by_roundings_of_its_own():
    fused = replace(CONTROL, drifts=dict.fromkeys(PARAMETERS, 0.2))
    assert verdict(fused).status == "red"
    stock = replace(STOCK, drift_roundings=dict.fromkeys(PARAMETERS, 0.4))
    assert verdict(fused, stock=stock).status == "green"


@pytest.mark.parametrize(
    ("changes", "divergence"),
    [
        ({"outputs": {LAYERS[1]: 1.0, LAYERS[2]: 1.0}}, "model.layers.1, forward: model.layers.1"),
        ({"outputs": {LAYERS[0]: 1.0, LAYERS[2]: 1.0}}, "model.layers.0, forward: model.layers.0"),
        # The gradient of layer 0's output is computed in layer 1.
        ({"output_gradients": {LAYERS[0]: 1.0}}, "model.layers.1, backward: gradient of model.layers.0"),
        ({"gradients": dict.fromkeys(PARAMETERS[:2], 1.0)}, "model.layers.0, backward: model.layers.0.norm.weight"),
        ({"gradients": {PARAMETERS[0]: 1.0}}, "model.embed_tokens.weight, backward: model.embed_tokens.weight"),
    ],
)
def test_the_first_layer_that_diverges_is_named(changes, divergence):
    fields = {name: {**dict.fromkeys(PLACES[name], 0.0), **values} for name, values in changes.items()}
    assert verdict(replace(CONTROL, **fields)).divergence == divergence


def test_a_fused_run_alone_that_is_not_finite_is_red():
    result = verdict(replace(CONTROL, losses=(5.0, math.nan), gradient_norms=(1.0, 1.0)))
    assert result.status == "red"
    assert result.reasons == ("the fused run is not finite in step 1, and the stock run is",)
    lost = replace(CONTROL, gradients=dict.fromkeys(PARAMETERS, math.inf))
    assert verdict(lost).status == "red"
    assert verdict(replace(CONTROL, gradients=dict.fromkeys(PARAMETERS, math.nan))).status == "red"


BROKEN = replace(STOCK, losses=(5.0, math.nan, 1.0))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"stock": BROKEN}, "the stock run is not finite"),
        ({"controls": (CONTROL, BROKEN)}, "the control 1 run is not finite"),
        ({"controls": ()}, "no noise floor"),
        ({"stock": replace(STOCK, moved={})}, "no norm weight is trained"),
        ({"stock": replace(STOCK, constant=("a", "b"))}, "a and 1 other norm weights started as one"),
        ({"stock": replace(STOCK, moved={"a": 0.0, "b": 1.0})}, "a never moved"),
        ({"controls": (CONTROL, STOCK)}, "control 1 is the stock run to the last bit"),
        ({"calls": replace(CALLS, not_seen=NORMS)}, "and 2 other sites ran as stock code does"),
    ],
)
def test_a_comparison_that_says_nothing_is_invalid(arguments, reason):
    result = verdict(**{"fused": CONTROL, **arguments})
    assert result.status == "invalid"
    assert reason in result.reasons[0]


def test_a_value_that_is_another_the_second_time_is_red():
    calls = replace(CALLS, bits={PARAMETERS[0]: 1e-3})
    result = verdict(CONTROL, calls=calls)
    assert (result.status, result.divergence) == ("red", f"{PARAMETERS[0]}, backward: {PARAMETERS[0]}")
    assert "a second time" in result.reasons[0]


def test_a_call_that_is_wrong_asks_for_no_more_controls():
    calls = replace(CALLS, outputs=dict.fromkeys(NORMS, 0.5))
    assert verdict(run_record(0.5)).is_red_by_noise
    assert not verdict(run_record(0.5), calls=calls).is_red_by_noise
    assert not verdict(run_record(1e-2, losses=(5.001, 4.0, 3.0))).is_red_by_noise
