"""The bytes that a step holds are measured, and a recompute level that saves none is named."""

import contextlib

import pytest
import torch
from torch import nn

from fused_norm import apply_fused_norm
from fused_norm.convergence.held_memory import Allocations, held_memory
from fused_norm.convergence.step_checks import check_levels

from ..planted.faults import FAULTS
from .plans import DEVICE, TOKENS, small


def test_bytes_are_counted_as_they_are_at_each_moment():
    before = torch.ones(7, 3, device=DEVICE)
    with Allocations(torch.device(DEVICE)) as allocations:
        start = allocations.moment()
        summed = before + 1
        first = allocations.moment()
        more = summed.exp()
        second = allocations.moment()
        del summed
        third = allocations.moment()
    assert [allocations.held[time] - allocations.held[start] for time in (first, second, third)] == [84, 168, 84]
    assert more.shape == (7, 3)


def test_a_step_holds_in_each_layer_what_autograd_keeps_of_it():
    layers = {"a": nn.Linear(5, 5, bias=False).to(DEVICE), "b": nn.Tanh()}
    x = torch.randn(11, 5, device=DEVICE, requires_grad=True)
    by_layer, after_backward = held_memory(
        lambda: layers["b"](layers["a"](x) * x.exp()).sum(), layers, torch.device(DEVICE)
    )
    assert by_layer == {"a": 220, "b": 220}
    # The outputs of the linear, the exponential and the tanh; at most the loss's own bytes on top.
    assert 3 * 220 <= after_backward <= 3 * 220 + 64


def levels(fault=None, *, layers=1):
    model = small(dtype=torch.bfloat16, layers=layers)
    apply_fused_norm(model)
    with FAULTS[fault].planted(model) if fault else contextlib.nullcontext():
        return check_levels(model, TOKENS, {}, calls=[])


@pytest.mark.slow
def test_each_level_of_recomputation_holds_less_with_the_same_bits():
    bits, not_kept = levels()
    assert set(bits.values()) == {0.0}
    assert {name.rpartition("=")[2] for name in bits} == {"True", "'mlp'", "'attention'"}
    assert not_kept == {}


@pytest.mark.slow
def test_a_layer_that_keeps_all_is_named_though_every_bit_is_right():
    """Faults of the other kinds are planted in whole comparisons, in ``tests/planted/test_runs.py``."""
    bits, not_kept = levels("recomputed-one-layer", layers=2)
    assert set(bits.values()) == {0.0}
    assert set(map(tuple, not_kept.values())) == {("model.layers.0",)}
    assert "with recompute=True it holds as many bytes for its backward as with recompute=False" in not_kept
