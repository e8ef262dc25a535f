"""A step of a Trainer is judged by its distance from the same step in float64, and the Trainer stays as it was."""

import copy
import random
from types import MethodType

import numpy
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, default_data_collator

from fused_norm import apply_fused_norm
from fused_norm.check.trainer_steps import check_trainer
from fused_norm.integrations.trainer import FusedNormCallback
from fused_norm.model_configs import build, tiny_config

from ..examples.checkpoints import save_checkpoint
from ..patcher.models import is_fused, rows_of, trainer_of
from ..planted.faults import FAULTS

DATA = rows_of(torch.randint(0, 256, (6, 8), generator=torch.Generator().manual_seed(1)))


def llama(**options):
    """Build a model of one layer."""
    return build(tiny_config("llama", num_hidden_layers=1, **options), seed=0)


class OwnLoss(Trainer):
    """Computes a loss of logits, of inputs that it takes out of the batch, and writes down what it sees."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = {"steps": []}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = self.model(**inputs).logits[:, :-1].float() / 0.7
        log_probs = logits.log_softmax(-1).gather(-1, labels[:, 1:, None])
        loss = (log_probs * (1 + torch.rand(log_probs.shape) + random.random() + numpy.random.rand())).square().mean()
        self.seen["steps"].append(model)
        self.log({"own": 0.0})
        return loss


class DrawingCollator:
    """Draws random numbers for each batch, from a generator of its own."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, rows):
        batch = default_data_collator(rows)
        batch["input_ids"][:, 3] = torch.randint(256, (len(rows),), generator=self.generator)
        return batch


def trainer(folder, model=None, **options):
    return trainer_of(model or llama(), folder, DATA, **{"max_steps": 2, "per_device_train_batch_size": 2} | options)


@pytest.mark.parametrize("kind", [Trainer, OwnLoss])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_fused_step_of_a_trainer_is_as_near_to_the_truth_as_the_stock_step(kind, bf16, tmp_path):
    checked = trainer(tmp_path, kind=kind, bf16=bf16)
    result = check_trainer(checked)
    assert result.ok, str(result)
    assert result.dtype == (torch.bfloat16 if bf16 else torch.float32)
    assert result.truth == torch.float64
    assert {row.name for row in result.deviations} == {
        "loss",
        *(f"{name}.grad" for name, _ in checked.model.named_parameters()),
    }
    assert result.report.counts["norm"] == 3
    assert str(result).endswith("verdict: within budget in one step")
    errors = [row.stock for row in result.deviations]
    # Those of bf16 or of fp32, not of other random numbers.
    assert (1e-4 < max(errors) < 0.05) if bf16 else (max(errors) < 1e-5)
    if bf16:  # a truth in float32 is not computed under autocast
        in_float32 = check_trainer(checked, truth=torch.float32)
        assert [row.stock for row in in_float32.deviations] == pytest.approx(errors, rel=0.05, abs=1e-6)


def test_a_forward_on_the_instance_that_has_the_model_in_its_closure_runs_the_copies(tmp_path):
    def scaled(model):
        forward = model.forward

        def around(self, input_ids, labels=None, *, factor=2, **others):
            if factor == 1:  # it has itself in its closure, too
                return around(self, input_ids, labels, **others)
            output = forward(input_ids=input_ids, labels=labels, **others)
            output.loss = factor * output.loss
            return output

        model.forward = MethodType(around, model)
        return model

    checked = trainer(tmp_path, scaled(llama()))
    own = checked.model.forward.__func__
    result = check_trainer(checked)
    assert result.ok, str(result)
    assert max(row.stock for row in result.deviations) < 0.05
    assert checked.model.forward.__func__ is own
    assert checked.model.forward.__self__ is checked.model


@pytest.mark.parametrize("name", ["linear_cross_entropy-unshifted", "add_rms_norm_for_consumers-dropped"])
def test_a_fault_in_the_step_of_a_trainer_is_over_budget(name, tmp_path):
    checked = trainer(tmp_path)
    with FAULTS[name].planted(checked.model) as planted:
        result = check_trainer(checked)
    assert planted.calls > 0
    assert not result.ok
    assert "over budget" in str(result)


@pytest.mark.parametrize("kind", [Trainer, OwnLoss])
def test_a_trainer_that_was_checked_is_as_it_was_and_trains_as_one_that_was_not(kind, tmp_path):
    finals, histories = [], []
    for is_checked in (True, False):
        torch.manual_seed(3), random.seed(3), numpy.random.seed(3)
        each = trainer(tmp_path, llama(attention_dropout=0.3), kind=kind)
        each.data_collator = DrawingCollator()
        fused = apply_fused_norm(each.model)
        if is_checked:
            before = {name: copy.copy(value) for name, value in vars(each).items()}
            loaders = each.accelerator.gradient_state.dataloader_references
            of_accelerator = copy.deepcopy(each.accelerator._dataloaders), len(each.accelerator._models)
            assert check_trainer(each).report.counts == fused.counts
            assert vars(each).keys() == before.keys()
            same = [name for name, value in before.items() if isinstance(value, (dict, list, int))]
            assert {name: vars(each)[name] for name in same} == {name: before[name] for name in same}
            assert getattr(each, "seen", {}).get("steps", []) == []
            assert (each.accelerator._dataloaders, len(each.accelerator._models)) == of_accelerator
            assert each.accelerator.gradient_state.dataloader_references == loaders
            assert all(is_fused(norm) for norm in (each.model, each.model.model.norm))
            assert each.model.model.layers[0].self_attn.attention_dropout == 0.3
            assert all(parameter.grad is None for parameter in each.model.parameters())
        each.train()
        finals.append([parameter.detach().clone() for parameter in each.model.parameters()])
        histories.append([(row.get("loss"), row.get("own")) for row in each.state.log_history])
    assert histories[0] == histories[1]
    assert all(map(torch.equal, *finals))


def test_the_options_are_those_of_the_trainers_callback_unless_others_are_given(tmp_path):
    checked = trainer(tmp_path, callbacks=[FusedNormCallback(mlp=False)])
    assert check_trainer(checked).report.counts["mlp"] == 0
    assert check_trainer(checked, options={"residual": False}).report.counts["mlp"] == 1


def test_what_cannot_be_checked_is_an_error_in_words(tmp_path, monkeypatch):
    checked = trainer(tmp_path)
    data = checked.train_dataset
    for nothing in (None, []):
        checked.train_dataset = nothing
        with pytest.raises(ValueError, match="has no data to take a batch of"):
            check_trainer(checked)
    checked.train_dataset = rows_of(torch.full((4, 2), 7))
    with pytest.raises(ValueError, match="the step has 2 predictions"):
        check_trainer(checked)
    checked.train_dataset = data
    with monkeypatch.context() as patch:
        patch.setattr(
            checked, "compute_loss_func", lambda outputs, labels, num_items_in_batch: 0 * outputs.logits.sum()
        )
        with pytest.raises(ValueError, match="every gradient of the stock step is zero"):
            check_trainer(checked)
    with monkeypatch.context() as patch:
        patch.setattr(type(checked.accelerator), "num_processes", 2)
        with pytest.raises(ValueError, match="shared by several processes, or sharded"):
            check_trainer(checked)
    with monkeypatch.context() as patch:
        patch.setattr(checked.args, "_n_gpu", 2)
        with pytest.raises(ValueError, match="on several devices"):
            check_trainer(checked)
    checked.model.model.layers[0].compile()
    with pytest.raises(ValueError, match="its model is compiled"):
        check_trainer(checked)


def test_a_trainer_that_has_begun_under_mixed_precision_is_refused(tmp_path):
    checked = trainer(tmp_path, bf16=True, max_steps=1)
    checked.train()
    with pytest.raises(ValueError, match=r"prepared for mixed precision already: check the Trainer before train\(\)"):
        check_trainer(checked)


def test_a_loss_that_has_no_float64_says_so_and_is_checked_in_float32(tmp_path):
    class Weighted(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return (model(**inputs).logits @ torch.ones(264, 1)).square().mean()

    checked = trainer(tmp_path, kind=Weighted, bf16=True)
    with pytest.raises(ValueError, match=r"Weighted computes no loss in float64: .*dtype"):
        check_trainer(checked)
    assert check_trainer(checked, truth=torch.float32).ok


def trl_trainer(method, folder, adapters):
    """Return a trainer of TRL for a tiny model, which is trained as a whole or by adapters under bf16 autocast."""
    trl = pytest.importorskip("trl", reason="needs trl")
    from datasets import Dataset

    checkpoint = str(save_checkpoint("llama", folder / "checkpoint"))
    words = ["import sys", "return 1", "for x in y", "def f(x):"]
    given = {
        "model": AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32),
        "processing_class": AutoTokenizer.from_pretrained(checkpoint),
    }
    if adapters:
        given["peft_config"] = LoraConfig(
            r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.1, task_type="CAUSAL_LM"
        )
    settings = {
        "output_dir": str(folder / "out"), "report_to": "none", "use_cpu": not torch.cuda.is_available(),
        "bf16": adapters, "per_device_train_batch_size": 2, "max_steps": 1, "disable_tqdm": True,
    }  # fmt: skip
    if method == "grpo":
        config = trl.GRPOConfig(num_generations=2, max_completion_length=12, beta=0.04, **settings)
        given |= {"train_dataset": Dataset.from_dict({"prompt": words}), "reward_funcs": letters}
        return trl.GRPOTrainer(args=config, **given)
    turned = [text[::-1] for text in words]
    columns = {
        "sft": {"text": words},
        "dpo": {"prompt": words, "chosen": turned, "rejected": [2 * text for text in words]},
        "kto": {"prompt": words, "completion": turned, "label": [True, False] * 2},
    }[method]
    config = getattr(trl, f"{method.upper()}Config")(max_length=24, **settings)
    return getattr(trl, f"{method.upper()}Trainer")(args=config, train_dataset=Dataset.from_dict(columns), **given)


def letters(completions, **_):
    """Reward completions by their letters, so that they differ."""
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("method", ["sft", "dpo", "kto", "grpo"])
def test_a_step_of_trainers_of_trl_is_held_to_the_truth_and_a_fault_in_it_is_over_budget(method, adapters, tmp_path):
    checked = trl_trainer(method, tmp_path, adapters)
    result = check_trainer(checked)
    assert result.ok, str(result)
    assert result.truth == torch.float64
    assert (result.report.counts["norm"], result.report.counts["loss"]) == (5, 1)
    assert not any(checked._metrics["train"].values())
    assert not any(map(is_fused, checked.model.modules()))
    if method == "grpo":
        assert (checked._step, checked._buffered_inputs, len(checked._logs["completion"])) == (0, None, 0)
    for name in ("add_rms_norm_for_consumers-dropped", "linear_log_probs-shifted"):
        with FAULTS[name].planted(checked.model) as planted:
            result = check_trainer(checked)
        assert planted.calls > 0
        assert not result.ok
