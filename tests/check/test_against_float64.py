"""A step is judged by its distance from the same step in float64; a step that is too far off fails."""

import contextlib
import json
import math
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fused_norm import FusedNormError, apply_fused_norm, remove_fused_norm
from fused_norm.check.against_float64 import budget, check_step
from fused_norm.model_configs import FAMILIES, build, families_here, tiny_config

from ..conftest import HAS_GPU
from ..planted.faults import FAULTS


def tokens_of(model):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (2, 8), generator=generator).to(model.device)


def small(model_type, attention_dropout=0.0, **options):
    """Build a tiny model of a family, with one layer."""
    config = tiny_config(model_type, num_hidden_layers=1, attention_dropout=attention_dropout)
    return build(config, seed=1, **options)


class Steps:
    """Follows the steps of a check: ``now`` is the current step, and ``before`` is called before each step."""

    def __init__(self, before=lambda step: None):
        self.now, self.before = None, before

    def __call__(self, names):
        for self.now in names:
            self.before(self.now)
            yield self.now


OF_LOG_PROBS = [name for name, fault in FAULTS.items() if fault.where == "log-probs"]
OF_LOG_PROBS += [f"linear_log_probs-{what}" for what in ("shifted", "temperature", "entropy")]


@pytest.mark.parametrize("name", [None, *OF_LOG_PROBS])
def test_a_loss_of_log_probs_is_held_to_the_truth_and_a_fault_in_it_is_over_budget(name, device):
    model = small("llama", dtype=torch.bfloat16, device=device)
    labels = tokens_of(model)
    labels[:, :3] = labels[1:] = -100
    with contextlib.ExitStack() as stack:

        def before(step):
            if name is not None and step == "fused":
                planted.append(stack.enter_context(FAULTS[name].planted(model)))

        planted = []
        result = check_step(model, tokens_of(model), labels, loss_of="log-probs", progress=Steps(before))
    assert result.ok == (name is None), str(result)
    assert [fault.calls > 0 for fault in planted] == [True] * (name is not None)
    gradients = {f"{name}.grad" for name, _ in model.named_parameters()}
    assert {row.name for row in result.deviations} == {"log-probs", "entropies", "loss", *gradients}


def damaged(model, path, change):
    """Check a model whose norm weight at ``path`` is changed in the fused step."""

    def before(step):
        if step == "fused":
            change(model.get_submodule(path).weight.data)

    return check_step(model, tokens_of(model), progress=Steps(before))


def assert_near_to_the_truth(model):
    result = check_step(model, tokens_of(model))
    assert result.ok, str(result)
    assert result.truth == torch.float64
    sites = FAMILIES[model.config.model_type].sites(model.config.num_hidden_layers)
    assert result.report.counts["norm"] == sites["norm"]
    names = {row.name for row in result.deviations}
    assert names == {"logits", "loss", *(f"{name}.grad" for name, _ in model.named_parameters())}


@pytest.mark.parametrize(("model_type", "dtype"), [("qwen3", torch.float32), ("gemma3_text", torch.bfloat16)])
def test_the_fused_step_is_as_near_to_the_truth_as_the_stock_step(model_type, dtype, device):
    assert_near_to_the_truth(small(model_type, dtype=dtype, device=device))


UNALIKE = {"granite", "olmo2", "gpt_oss", "gemma4_text", "qwen3_5_moe_text"}
"""Families with a scaled branch, norms behind branches, experts, sandwiches, and convolutions."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [name if name in UNALIKE else pytest.param(name, marks=pytest.mark.release) for name in families_here()],
)
def test_in_every_family_the_fused_step_is_as_near_to_the_truth(model_type, device):
    assert_near_to_the_truth(build(model_type, seed=1, dtype=torch.float32, device=device))


def test_nothing_in_the_truth_is_rounded_to_float32():
    class NoteFloat32(TorchDispatchMode):
        model_runs = False

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float32 and self.model_runs:
                roundings[steps.now].append(str(func))
            return out

    steps, roundings = Steps(), {"truth": [], "stock": [], "fused": []}
    model = small("gemma3_text")
    mode = NoteFloat32()
    model.register_forward_pre_hook(lambda *_: setattr(mode, "model_runs", True))
    with mode:
        check_step(model, tokens_of(model), progress=steps)
    assert roundings["truth"] == []
    assert roundings["stock"]


def test_a_norm_that_is_off_by_little_is_over_budget(device):
    result = damaged(
        small("llama", device=device), "model.layers.0.input_layernorm", lambda weight: weight.mul_(1 + 1e-4)
    )
    assert not result.ok
    assert "over budget" in str(result)
    assert json.loads(result.to_json())["ok"] is False


@pytest.mark.parametrize("where", ["loss", "lm_head.weight.grad", "model.norm.weight.grad"])
def test_a_loss_or_gradient_that_alone_is_off_by_little_is_over_budget(where, device):
    model = small("llama", device=device)

    def before(step):
        if step != "fused":
            return
        if where == "loss":
            model.register_forward_hook(lambda module, inputs, output: output.loss.data.mul_(1.003) and None)
        else:
            model.get_parameter(where.removesuffix(".grad")).register_hook(lambda gradient: gradient * 1.01)

    result = check_step(model, tokens_of(model), progress=Steps(before))
    assert {row.name for row in result.deviations if not row.ok} == {where}


def test_a_nan_is_over_budget(device):
    result = damaged(small("llama", device=device), "model.norm", lambda weight: weight.fill_(math.nan))
    assert not result.ok
    assert result.worst(1)[0].share == math.inf
    assert None in [row["fused"] for row in json.loads(result.to_json())["deviations"]]


@pytest.mark.parametrize("loss_of", ["labels", "log-probs"])
def test_the_model_is_left_stock_in_its_mode_without_gradients(loss_of, device):
    model, state = (
        small("qwen3", attention_dropout=0.25, device=device).train(loss_of == "labels"),
        torch.get_rng_state(),
    )
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    check_step(model, tokens_of(model), loss_of=loss_of)
    assert remove_fused_norm(model) == 0
    assert {module.training for module in model.modules()} == {loss_of == "labels"}
    assert model.model.layers[0].self_attn.attention_dropout == 0.25
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_patched_model_is_not_compared_with_itself(device):
    model = small("qwen3", device=device)
    tokens = tokens_of(model)
    stock = check_step(model, tokens)
    apply_fused_norm(model)
    assert check_step(model, tokens).deviations == stock.deviations


def test_the_stock_error_is_of_five_steps_with_sums_in_other_orders(device):
    model, steps, logits = small("qwen3", device=device), Steps(), []
    model.register_forward_hook(lambda *called: logits.append(called[2].logits) if steps.now == "stock" else None)
    check_step(model, tokens_of(model), progress=steps)
    assert len(logits) == len({tuple(step.flatten().tolist()) for step in logits}) == 5
    assert all((step - logits[0]).norm() < 1e-5 * logits[0].norm() for step in logits)


def test_a_budget_is_that_of_the_usual_stock_step_and_as_wide_as_those_scatter():
    eps = torch.finfo(torch.float32).eps
    for numbers, predictions in ((64, 1000), (1000, 64)):
        assert budget([1e-3] * 5, numbers, predictions, torch.float32) == pytest.approx(1e-3 * (1.25 + 4 / 8) + eps)
    # Neither a lucky stock step nor an unlucky one sets the budget alone.
    rms = 1e-3 * math.sqrt(3.5 / 3)
    expected = rms * (1.25 + 4 * math.sqrt(2) * 0.5e-3 / rms) + eps
    assert budget([0.5e-3, 1e-3, 1.5e-3], 64, 64, torch.float32) == pytest.approx(expected)


def test_what_cannot_be_judged_is_an_error(device):
    model = small("llama", device=device)
    tokens = tokens_of(model)
    with pytest.raises(ValueError, match="0 predictions"):
        check_step(model, tokens[:, :1])
    with pytest.raises(ValueError, match="needs a float64 truth"):
        check_step(model, tokens, truth=torch.float32)
    with pytest.raises(ValueError, match="the truth must be"):
        check_step(model, tokens, truth=torch.bfloat16)
    model.model.norm.weight.data.fill_(math.inf)
    with pytest.raises(FusedNormError, match="not finite"):
        check_step(model, tokens)
    with pytest.raises(ValueError, match="these are float64"):
        check_step(model.double(), tokens)


def test_a_16_bit_model_may_be_held_against_float32(device):
    model = small("llama", dtype=torch.bfloat16, device=device)
    result = check_step(model, tokens_of(model), truth=torch.float32)
    assert result.ok
    assert "truth in float32" in str(result)


REPLAYED = {"cuda_graphs": True, "modules": "model.layers.*"}


@pytest.mark.usefixtures("replays_anywhere")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replayed_step_has_the_bits_of_the_eager_one(dtype, device):
    model = build("llama", seed=1, dtype=dtype, device=device)
    result = check_step(model, tokens_of(model), options=REPLAYED)
    assert result.ok, str(result)
    assert (result.replay.why_not, result.replay.differing) == (None, ())
    assert result.replay.compared == len(result.deviations) == 2 + len(list(model.parameters()))
    assert f"CUDA graphs: replayed, equal to eager to the bit in {result.replay.compared} tensors" in str(result)
    assert json.loads(result.to_json())["replay"]["compared"] == result.replay.compared


@pytest.mark.usefixtures("replays_hand_out_their_memory")
def test_a_replay_whose_gradients_are_overwritten_is_told_by_its_bits(device):
    model = build("llama", seed=1, dtype=torch.float32, device=device)
    result = check_step(model, tokens_of(model), options=REPLAYED)
    assert not result.ok
    assert result.replay.why_not is None
    assert all(name.endswith(".grad") for name in result.replay.differing)
    assert re.search(r"differs from eager in \d+ of \d+ tensors: model\.layers\.", str(result))
    assert str(result).endswith("CUDA graphs compute something else")


@pytest.mark.skipif(HAS_GPU, reason="there layers are replayed")
def test_a_step_that_is_not_replayed_says_why(device):
    model = small("llama", device=device)
    result = check_step(model, tokens_of(model), options=REPLAYED)
    assert (result.ok, result.replay.why_not) == (True, "there is no CUDA device")
    assert "CUDA graphs: not replayed: there is no CUDA device" in str(result)
    assert check_step(model, tokens_of(model)).replay is None
