"""The search for the longest sequences finds them in few steps, and tries none that are longer than it may."""

import random
from dataclasses import replace
from unittest import mock

import pytest
import torch

from benchmarks import cards
from benchmarks.cards import EXACT, LEAST, LIMITS, MOST, grain, longest, search, shape_of
from benchmarks.model_cases import ModelCase
from benchmarks.model_steps import BenchmarkedModel, prepare
from fused_norm import apply_fused_norm

GIB = 2**30


def test_the_search_ends_near_the_longest_that_fits():
    draw, tried = random.Random(0), 0
    for _ in range(2000):
        most = int(2 ** draw.uniform(6, 18))
        asked = []

        def fits(tokens, most=most, asked=asked):
            asked.append(tokens)
            return tokens <= most

        found = longest(fits, most * 2 ** draw.gauss(0, 0.1))
        assert min(asked) >= LEAST
        assert max(asked) <= MOST
        assert len({*asked}) == len(asked)
        assert found in (0, *asked)
        assert found <= most
        assert min(most, MOST) - found <= 2 * max(grain(found + 1), EXACT * found) or most < LEAST
        tried += len(asked)
    assert tried < 4 * 2000


@pytest.mark.slow
@pytest.mark.usefixtures("replays_anywhere")
@pytest.mark.parametrize("level", ["stock, gradient checkpointing", "ours, graphs"])
def test_what_a_card_takes_is_found_under_its_limit(level):
    # A stand-in for a GPU: a step takes a GiB and two MiB a token, and the allocator leaves a twentieth unused. Of a
    # step's tokens sixteen are real ones.
    peak, allowed, replays = [0], [0.0], []
    real = BenchmarkedModel.forward_backward

    def step(model):
        peak[0] = GIB + 2**21 * model.tokens.numel()
        if 1.05 * peak[0] > allowed[0]:
            raise torch.OutOfMemoryError
        few = model.tokens[:1, :16]
        return real(replace(model, tokens=few, inputs={"labels": few}))

    def limit(share):
        allowed[0] = share * 140 * GIB

    def patched(*args, **options):
        report = apply_fused_norm(*args, **options)
        replays.append(report.replays)
        return report

    limit(1.0)
    model = prepare(ModelCase.named("tiny-llama lora loss 1x16"), torch.float32, torch.device("cpu"))
    stand_in = {
        "get_device_properties": lambda _: mock.Mock(total_memory=140 * GIB),
        "set_per_process_memory_fraction": limit,
        "reset_peak_memory_stats": lambda: None,
        "max_memory_allocated": lambda: peak[0],
        "synchronize": lambda: None,
    }
    with (
        mock.patch.multiple(torch.cuda, **stand_in),
        mock.patch.object(BenchmarkedModel, "forward_backward", step),
        mock.patch.object(cards, "apply_fused_norm", patched),
    ):
        cells = list(search(model, level))
    assert [cell["card"] for cell in cells] == [*LIMITS]
    for cell in cells:
        needed = 1.05 * (GIB + 2**21 * cell["tokens"])
        assert 0.9 * LIMITS[cell["card"]] * GIB < needed <= LIMITS[cell["card"]] * GIB
    assert allowed[0] == 140 * GIB
    assert any(each.forwards == each.backwards > 0 for each in replays) == ("graphs" in level)


def test_what_is_too_long_for_one_sequence_is_a_batch():
    assert shape_of(cards.CONTEXT) == (1, cards.CONTEXT)
    assert shape_of(20 * cards.PART) == (20, cards.PART)


def test_no_model_has_a_window_whose_mask_would_take_memory():
    for name, _ in cards.RECIPES.values():
        assert ModelCase.named(f"{name} loss 1x1024").config().sliding_window is None
