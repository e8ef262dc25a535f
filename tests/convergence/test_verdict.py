"""A run within the noise is green, one that leaves it anywhere is red, a comparison that says nothing is invalid."""

import dataclasses
import math

import pytest

from fused_norm.convergence.run_record import RunRecord
from fused_norm.convergence.verdict import BITS_BAR, MEASURES, judge, noise_floor

LAYERS = ("model.layers.0", "model.layers.1", "logits")
NORMS = ("model.layers.0.norm", "model.layers.1.norm", "model.norm")
PARAMETERS = ("model.embed_tokens.weight", "model.layers.0.norm.weight", "model.layers.1.norm.weight")
ROUNDING = 2.0**-8
PLACES = {
    "outputs": LAYERS,
    "output_gradients": LAYERS,
    "gradients": PARAMETERS,
    "drifts": PARAMETERS,
} | dict.fromkeys(("norm_outputs", "bits", "overwritten", "input_gradients", "weight_gradients"), NORMS)


def run_record(level=0.0, *, losses=(5.0, 4.0, 3.0), norms=(1.0, 1.0, 2.0), **changes):
    """A run at the same distance from stock everywhere."""
    fields = {name: dict.fromkeys(places, level) for name, places in PLACES.items()}
    fields |= {"bits": dict.fromkeys(NORMS, 0.0), "overwritten": dict.fromkeys(NORMS, 0.0)}
    moved = dict.fromkeys(PARAMETERS[1:], 0.01)
    return RunRecord(losses, norms, 0.1, 1, {"norm": 3}, moved, **fields | changes)


STOCK = run_record()
CONTROL = run_record(1e-2, losses=(5.001, 4.0, 3.0), norms=(1.01, 1.01, 2.5))
CONTROLS = (CONTROL, run_record(0.5e-2, losses=(5.0, 4.0, 3.0001), norms=(1.0, 1.0, 2.1)))


def verdict(fused, precision="bf16", controls=CONTROLS, stock=STOCK):
    return judge(precision, stock, controls, fused)


def test_a_run_that_is_as_far_off_as_the_controls_is_green():
    found = verdict(run_record(1e-2, losses=(5.001, 4.0, 3.0)))
    assert found.status == "green"
    assert not found.reasons
    assert {check.measure for check in found.checks} == {measure.name for measure in MEASURES}


@pytest.mark.parametrize("name", PLACES)
def test_one_place_beyond_its_bound_is_red_and_named(name):
    places = PLACES[name]
    measure = next(measure for measure in MEASURES if measure.name == name)
    noise = 0.0 if name in ("bits", "overwritten") else 1e-2
    bound = BITS_BAR if name == "bits" else measure.multiple * noise + measure.floor * ROUNDING
    within, beyond = ({**dict.fromkeys(places, noise), places[1]: bound * share + tiny} for share, tiny in LIMITS)
    assert verdict(dataclasses.replace(CONTROL, **{name: within})).status == "green"
    found = verdict(dataclasses.replace(CONTROL, **{name: beyond}))
    assert found.status == "red"
    assert len(found.reasons) == 1
    assert places[1] in found.reasons[0]
    assert found.divergence.startswith("logits" if name == "output_gradients" else "model.layers.")


LIMITS = ((0.99, 0.0), (1.01, 1e-9))


def test_the_worst_control_sets_the_bound_and_lucky_places_get_that_of_the_median_place():
    assert noise_floor([{"a": 1.0, "b": 0.0, "c": 3.0}, {"a": 2.0, "b": 0.0, "c": 1.0}]) == {
        "a": 2.0,
        "b": 2.0,
        "c": 3.0,
    }


def test_losses_and_gradient_norms_are_held_to_the_controls():
    far = dataclasses.replace(CONTROL, losses=(5.001, 4.03, 3.0))
    assert "loss" in verdict(far).reasons[0]
    # One step with a spike says nothing about gradients; half of the steps do.
    assert verdict(dataclasses.replace(CONTROL, gradient_norms=(1.0, 1.0, 99.0))).status == "green"
    assert "gradient norm" in verdict(dataclasses.replace(CONTROL, gradient_norms=(1.1, 1.1, 2.0))).reasons[0]


def test_the_first_losses_in_fp32_have_an_absolute_bar():
    wild = dataclasses.replace(CONTROL, losses=(5.1, 4.1, 3.1))
    off = dataclasses.replace(CONTROL, losses=(5.0 * (1 + 2e-6), 4.0, 3.0))
    assert verdict(off, "fp32", (wild,)).status == "red"
    assert verdict(off, "bf16", (wild,)).status == "green"
    late = dataclasses.replace(CONTROL, losses=(5.0, 4.0, 3.0, 2.0 * (1 + 2e-6)))
    four = dataclasses.replace(STOCK, losses=(5.0, 4.0, 3.0, 2.0))
    wild = dataclasses.replace(wild, losses=(5.1, 4.1, 3.1, 2.1))
    assert verdict(late, "fp32", (wild,), four).status == "green"


def test_a_norm_in_fp32_is_held_to_fp32_in_a_model_that_is_not():
    stock = dataclasses.replace(STOCK, roundings=dict.fromkeys(NORMS, 2.0**-24))
    silent = dataclasses.replace(CONTROL, norm_outputs=dict.fromkeys(NORMS, 0.0))
    fused = dataclasses.replace(CONTROL, norm_outputs=dict.fromkeys(NORMS, 1e-6))
    assert verdict(fused, "mixed", (silent,)).status == "green"
    assert verdict(fused, "mixed", (silent,), stock).status == "red"


def test_a_parameter_may_drift_by_roundings_of_its_own():
    fused = dataclasses.replace(CONTROL, drifts=dict.fromkeys(PARAMETERS, 0.2))
    assert verdict(fused).status == "red"
    assert (
        verdict(fused, stock=dataclasses.replace(STOCK, drift_roundings=dict.fromkeys(PARAMETERS, 0.4))).status
        == "green"
    )


@pytest.mark.parametrize(
    ("changes", "divergence"),
    [
        ({"outputs": {LAYERS[1]: 1.0, LAYERS[2]: 1.0}}, "model.layers.1, forward: model.layers.1"),
        ({"outputs": {LAYERS[1]: 1.0}, "bits": {NORMS[1]: 0.3}}, "model.layers.1, forward: model.layers.1.norm"),
        ({"outputs": {LAYERS[0]: 1.0}, "bits": {NORMS[1]: 0.3}}, "model.layers.0, forward: model.layers.0"),
        # The gradient of layer 0's output is made in layer 1.
        ({"output_gradients": {LAYERS[0]: 1.0}}, "model.layers.1, backward: gradient of model.layers.0"),
        (
            {"gradients": {PARAMETERS[0]: 1.0, PARAMETERS[1]: 1.0}},
            "model.layers.0, backward: model.layers.0.norm.weight",
        ),
        ({"weight_gradients": {NORMS[2]: 1.0}}, "model.norm, backward: model.norm"),
        ({"gradients": {PARAMETERS[0]: 1.0}}, "model.embed_tokens.weight, backward: model.embed_tokens.weight"),
    ],
)
def test_the_first_layer_that_diverges_is_named(changes, divergence):
    fields = {name: {**dict.fromkeys(PLACES[name], 0.0), **values} for name, values in changes.items()}
    assert verdict(dataclasses.replace(CONTROL, **fields)).divergence == divergence


def test_a_fused_run_alone_that_is_not_finite_is_red():
    found = verdict(dataclasses.replace(CONTROL, losses=(5.0, math.nan), gradient_norms=(1.0, 1.0)))
    assert found.status == "red"
    assert found.reasons == ("the fused run is not finite in step 1, and the stock run is",)
    lost = dataclasses.replace(CONTROL, gradients=dict.fromkeys(PARAMETERS, math.inf))
    assert verdict(lost).status == "red"
    assert verdict(dataclasses.replace(CONTROL, gradients=dict.fromkeys(PARAMETERS, math.nan))).status == "red"


BROKEN = dataclasses.replace(STOCK, losses=(5.0, math.nan, 1.0))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"stock": BROKEN}, "the stock run is not finite"),
        ({"controls": (CONTROL, BROKEN)}, "the control 1 run is not finite"),
        ({"controls": ()}, "no noise floor"),
        ({"stock": dataclasses.replace(STOCK, moved={})}, "no norm weight is trained"),
        (
            {"stock": dataclasses.replace(STOCK, constant=("a", "b"))},
            "a and 1 other norm weights started as one",
        ),
        ({"stock": dataclasses.replace(STOCK, moved={"a": 0.0, "b": 1.0})}, "a never moved"),
        ({"controls": (CONTROL, STOCK)}, "control 1 is the stock run to the last bit"),
        (
            {"fused": dataclasses.replace(CONTROL, ran_stock_code=NORMS)},
            "and 2 other norms ran stock code in the fused",
        ),
    ],
)
def test_a_comparison_that_says_nothing_is_invalid(arguments, reason):
    found = verdict(**{"fused": CONTROL, **arguments})
    assert found.status == "invalid"
    assert reason in found.reasons[0]
