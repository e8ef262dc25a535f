"""A training run repeats exactly, reports what it did, and measures what it says."""

import math

import pytest
import torch

from fused_norm import apply_fused_norm
from fused_norm.convergence.tiers import TrainingOptions
from fused_norm.convergence.training import masked_labels, train
from fused_norm.model_configs import build


def sequences(count, length=16):
    return torch.randint(32, 127, (count, length), generator=torch.Generator().manual_seed(0))


def test_a_run_repeats_exactly_and_learns():
    options = TrainingOptions(steps=12, batch_size=2, learning_rate=1e-2, warmup_steps=2)
    batches = sequences(2).repeat(12, 1)
    first, second = (train(build("qwen3", seed=0), batches, options) for _ in range(2))
    assert first.losses == pytest.approx(second.losses, rel=1e-5)
    assert len(first.losses) == len(first.gradient_norms) == 12
    assert first.losses[-1] < first.losses[0] - 1


def gradient_norm(model):
    return torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm().item()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_first_loss_and_gradient_norm_are_those_of_the_first_batch_before_clipping(accumulation):
    batches = sequences(6)
    options = TrainingOptions(steps=3, batch_size=2, accumulation=accumulation, max_gradient_norm=1e-3)
    result = train(build("llama", seed=0), batches, options)
    model = build("llama", seed=0)
    loss = model(input_ids=batches[:2], labels=batches[:2]).loss
    loss.backward()
    assert result.losses[0] == pytest.approx(loss.item(), rel=1e-4)
    assert result.gradient_norms[0] == pytest.approx(gradient_norm(model), rel=1e-3)
    assert result.gradient_norms[0] > 1


def test_masked_labels_are_the_same_in_any_order_of_a_step_and_some_leave_out_a_sequence():
    tokens = sequences(8)
    labels = masked_labels(tokens, 4)
    counts = (labels[:, 1:] != -100).sum(1)
    assert torch.equal(labels[labels != -100], tokens[labels != -100])
    assert [int((part == 0).sum()) for part in counts.split(4)] == [0, 1]
    assert len(set(counts[:4].tolist())) > 1
    turned = masked_labels(tokens.view(2, 4, -1).flip(1).flatten(0, 1), 4)
    assert torch.equal(turned.view(2, 4, -1).flip(1).flatten(0, 1), labels)


def test_a_model_is_given_the_number_of_labels_if_its_forward_takes_it():
    tokens = sequences(4)
    labels = masked_labels(tokens, 4, few=False)
    model, calls = build("llama", seed=0), []
    model.register_forward_pre_hook(lambda _, args, named: calls.append(named), with_kwargs=True)
    train(model, tokens, TrainingOptions(steps=1, batch_size=4, accumulation=2), labels=labels)
    counts = [int(call["num_items_in_batch"]) for call in calls[:2]]
    assert counts == [int((labels[:, 1:] != -100).sum())] * 2
    model.accepts_loss_kwargs = False
    calls.clear()
    train(model, tokens, TrainingOptions(steps=1, batch_size=4, accumulation=2), labels=labels)
    assert calls
    assert not any("num_items_in_batch" in call for call in calls)


@pytest.mark.parametrize("fused", [False, True])
def test_masked_labels_have_a_mean_over_the_step_in_any_micro_batches(fused):
    tokens, results = sequences(8), []
    labels = masked_labels(tokens, 4)[4:]
    for accumulation in (2,) if fused else (1, 2, 4):
        model = build("llama", seed=0)
        if fused:
            apply_fused_norm(model)
        # A tiny learning rate, so that the second step has the weights of the first.
        options = TrainingOptions(steps=2, batch_size=4, accumulation=accumulation, learning_rate=1e-12)
        results.append(train(model, tokens, options, labels=masked_labels(tokens, 4)))
    model = build("llama", seed=0)
    loss = model(input_ids=tokens[4:], labels=labels).loss
    loss.backward()
    for result in results:
        assert result.losses == pytest.approx([results[0].losses[0], loss.item()], rel=1e-5)
        assert result.gradient_norms == pytest.approx([results[0].gradient_norms[0], gradient_norm(model)], rel=1e-4)
        assert result.evaluation_loss == pytest.approx(results[0].evaluation_loss, rel=1e-5)


def test_gradients_are_shown_before_they_are_clipped_and_the_model_after_the_last_step():
    shown, ended = [], []
    model = build("llama", seed=0)
    result = train(
        model,
        sequences(4),
        TrainingOptions(steps=2, batch_size=2, max_gradient_norm=1e-3),
        on_gradients=lambda step, trained: shown.append((step, gradient_norm(trained))),
        on_end=ended.append,
    )
    assert [step for step, _ in shown] == [0, 1]
    assert [norm for _, norm in shown] == pytest.approx(result.gradient_norms, rel=1e-4)
    assert len(ended) == 1


def test_training_ends_where_a_number_is_not_finite():
    result = train(build("llama", seed=0), sequences(12), TrainingOptions(steps=6, batch_size=2, learning_rate=1e30))
    assert len(result.losses) < 6
    assert not math.isfinite(result.losses[-1] + result.gradient_norms[-1])
    assert all(map(math.isfinite, result.losses[:-1] + result.gradient_norms[:-1]))


def test_the_learning_rate_rises_linearly_from_its_first_share():
    batches = sequences(4)
    moves = []
    for steps in (1, 2):
        model = build("llama", seed=0)
        train(model, batches, TrainingOptions(steps, 2, learning_rate=4e-3, warmup_steps=4, weight_decay=0.0))
        moves.append(torch.cat([p.detach().cpu().flatten() for p in model.parameters()]))
    start = torch.cat([p.detach().flatten() for p in build("llama", seed=0).parameters()])
    # AdamW's first step moves every weight with a gradient by the learning rate, its second by at most about that.
    assert (moves[0] - start).abs().max().item() == pytest.approx(1e-3, rel=1e-2)
    assert (moves[1] - moves[0]).abs().max().item() == pytest.approx(2e-3, rel=5e-2)
