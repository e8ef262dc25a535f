"""Trainers of TRL give a model its losses, metrics and weights, fused as in stock, whatever comes first."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

from benchmarks.trainers import make_texts, make_tokenizer
from fused_norm import apply_fused_norm, remove_fused_norm
from fused_norm.integrations.trainer import FusedNormCallback
from fused_norm.model_configs import build, tiny_config

from ..conftest import slow_rows
from ..patcher.conftest import launches

__all__ = ["launches"]

TEXTS = [" ".join(text) for text in make_texts(8, 6, is_padded=True)]
VOCABULARY = 272
"""More words than the tokenizer has."""

OF_GENERATION = {"num_generations": 2, "max_completion_length": 4, "temperature": 0.7}
TRAINERS: dict[str, dict[str, Any]] = {
    "SFT": {"max_length": 8},
    "DPO": {"max_length": 16},
    "KTO": {"max_length": 16},
    "GRPO": {"beta": 0.0, "entropy_coef": 0.01, **OF_GENERATION},
    "RLOO": {"beta": 0.0, **OF_GENERATION},
}
"""The options of each trainer's config."""

PAIRS = list(zip(TEXTS, TEXTS[1:] + TEXTS[:1], TEXTS[2:] + TEXTS[:2], strict=True))
ROWS: dict[str, list[dict[str, Any]]] = {
    "SFT": [{"text": text} for text in TEXTS],
    "DPO": [{"prompt": a, "chosen": f" {b}", "rejected": f" {c}"} for a, b, c in PAIRS],
    "KTO": [{"prompt": a, "completion": f" {b}", "label": bool(i % 2)} for i, (a, b, _) in enumerate(PAIRS)],
    "GRPO": [{"prompt": text} for text in TEXTS],
    "RLOO": [{"prompt": text} for text in TEXTS],
}
OF_THE_CLOCK = ("time", "runtime", "per_second", "flos")


@pytest.fixture
def trl() -> Any:
    return pytest.importorskip("trl", reason="needs trl")


def llama() -> Any:
    config = tiny_config("llama", num_hidden_layers=1, vocab_size=VOCABULARY, pad_token_id=1, eos_token_id=2)
    return build(config, seed=0)


def reward(completions: list[str], **others: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def trainer_of(trl: Any, kind: str, folder: Path, model: nn.Module, **options: Any) -> Any:
    """A trainer of a kind; ``options``: its own, or those of its config."""
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    datasets.disable_progress_bars()
    own = {name: options.pop(name) for name in ("peft_config", "callbacks") if name in options}
    # Adam makes steps of one size of gradients that are rounding alone.
    how = {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 0.05,
        "optim": "sgd", "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, **TRAINERS[kind], **options,
    }  # fmt: skip
    data = datasets.Dataset.from_list(ROWS[kind])
    if kind in ("GRPO", "RLOO"):
        own["reward_funcs"] = reward
    else:
        own["eval_dataset"] = data
    if kind in ("DPO", "KTO") and "peft_config" not in own:
        own["ref_model"] = copy.deepcopy(model)
    arguments = getattr(trl, f"{kind}Config")(**how)
    return getattr(trl, f"{kind}Trainer")(
        model=model, processing_class=make_tokenizer(), args=arguments, train_dataset=data, **own
    )


def trained(trainer: Any) -> tuple[list[Mapping[str, float]], dict[str, torch.Tensor]]:
    """Train, and return the logs without times, and the weights."""
    torch.manual_seed(0)
    trainer.train()
    logs = [
        {name: value for name, value in row.items() if not any(word in name for word in OF_THE_CLOCK)}
        for row in trainer.state.log_history
        if {"loss", "eval_loss"} & row.keys()
    ]
    return logs, {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def assert_alike(actual: Any, expected: Any, *, rtol: float = 1e-4, atol: float = 2e-5) -> None:
    """Compare what ``trained`` returned; fp32 steps differ by the order of sums."""
    (logs, weights), (of_stock, stock_weights) = actual, expected
    assert [row.keys() for row in logs] == [row.keys() for row in of_stock]
    for row, other in zip(logs, of_stock, strict=True):
        # If the reference is not patched, the first one is the sign of a rounding.
        if "rewards/accuracies" in other and abs(other["rewards/margins"]) < atol:
            row = {**row, "rewards/accuracies": other["rewards/accuracies"]}
        assert row == pytest.approx(other, rel=rtol, abs=atol)
    assert weights.keys() == stock_weights.keys()
    for name, weight in stock_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def lora(**how: Any) -> peft.LoraConfig:
    return peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False, **how)


def fused_trainer(trl: Any, kind: str, folder: Path, order: str, **options: Any) -> tuple[Any, Any]:
    """A trainer of a model that is patched in this order, and the row of the loss when training begins."""
    model, callback = llama(), FusedNormCallback()
    if order == "patch, trainer":
        apply_fused_norm(model)
    trainer = trainer_of(trl, kind, folder, model, callbacks=[callback] if order == "callback" else [], **options)
    if order == "add_callback":
        trainer.add_callback(callback)
    if order == "trainer, patch":
        apply_fused_norm(trainer.model)
    return trainer, callback


def loss_row(report: Any) -> Any:
    (row,) = (row for row in report.rows if row.kind == "loss")
    return row


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        ("SFT", "callback"),
        *slow_rows(*(("SFT", order) for order in ("patch, trainer", "trainer, patch", "add_callback"))),
        *slow_rows(("DPO", "patch, trainer"), ("DPO", "trainer, patch")),
    ],
)
def test_a_trainer_takes_the_steps_of_stock_in_every_order(
    kind: str, order: str, trl: Any, launches: list[str], tmp_path: Path
) -> None:
    expected = trained(trainer_of(trl, kind, tmp_path, llama()))
    assert "linear_log_probs" not in launches
    trainer, callback = fused_trainer(trl, kind, tmp_path, order)
    assert_alike(trained(trainer), expected)
    assert launches.count("linear_log_probs") >= 3
    assert "linear_cross_entropy" not in launches
    if "callback" in order:
        assert (loss_row(callback.report).reason, loss_row(callback.report).trainer) == (None, "TRL")


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", TRAINERS)
def test_after_twenty_steps_losses_metrics_and_weights_are_stocks(
    kind: str, adapters: bool, trl: Any, launches: list[str], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"max_steps": 20, "gradient_accumulation_steps": 2}
    if adapters:
        options["peft_config"] = lora()
    if kind in ("SFT", "DPO"):
        options |= {"eval_strategy": "steps", "eval_steps": 10}
    runs = []
    for order in ("stock", "callback"):
        torch.manual_seed(0)  # of the adapters
        trainer, _ = fused_trainer(trl, kind, tmp_path, order, **options)
        runs.append(trained(trainer))
    assert_alike(runs[1], runs[0])
    assert len(runs[0][0]) >= 20
    assert launches.count("linear_log_probs") >= 40


@pytest.mark.slow
def test_under_bf16_autocast_a_run_is_as_far_from_stock_as_with_trls_own_head(trl: Any, tmp_path: Path) -> None:
    """Patched layers round as stock's, but for sums: their distance to stock is the noise."""
    options = {"max_steps": 20, "bf16": True}
    _, stock = trained(trainer_of(trl, "SFT", tmp_path, llama(), **options))
    distances = []
    for loss in (False, True):
        callback = FusedNormCallback(loss=loss)
        _, weights = trained(trainer_of(trl, "SFT", tmp_path, llama(), callbacks=[callback], **options))
        assert (loss_row(callback.report).reason is None) == loss
        distances.append(max((weights[name] - stock[name]).norm().item() for name in stock))
    assert distances[1] <= 2 * distances[0] + 1e-4, distances


@pytest.mark.slow
def test_a_callback_that_comes_after_accelerates_autocast_leaves_the_head_to_trl(
    trl: Any, tmp_path: Path, launches: list[str]
) -> None:
    trainer, callback = fused_trainer(trl, "SFT", tmp_path, "add_callback", bf16=True, max_steps=1)
    for _ in range(2):
        trainer.train()
        assert loss_row(callback.report).reason.startswith(
            "TRL's head computes the loss: its forward was replaced on the instance, by "
        )
    assert "rms_norm" in launches
    assert "linear_log_probs" not in launches


@pytest.mark.slow
def test_a_model_is_stock_again_after_a_trainer_under_autocast(trl: Any, tmp_path: Path, launches: list[str]) -> None:
    trainer, _ = fused_trainer(trl, "SFT", tmp_path, "callback", bf16=True, max_steps=1)
    trainer.train()
    of_accelerate = vars(trainer.model)["forward"]
    remove_fused_norm(trainer.model)
    assert vars(trainer.model)["forward"] is of_accelerate
    launches.clear()
    ids = torch.randint(3, 200, (2, 5))
    expected = llama()
    expected.load_state_dict(trainer.model.state_dict())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        fused = trainer.model(input_ids=ids, labels=ids, fused_lm_head=True)
        whole = trainer.model(input_ids=ids, labels=ids).loss
        assert fused.loss == pytest.approx(expected(input_ids=ids, labels=ids).loss.item(), rel=1e-2)
    assert whole == pytest.approx(fused.loss.item(), rel=1e-2)
    assert not launches


def test_the_callbacks_report_says_that_another_code_computes_the_loss(trl: Any, tmp_path: Path) -> None:
    callback = FusedNormCallback()
    trainer = trainer_of(trl, "SFT", tmp_path, llama(), callbacks=[callback], max_steps=1)
    assert loss_row(callback.report).trainer is None
    trainer.model.forward = lambda *args, run=trainer.model.forward, **how: run(*args, **how)
    trainer.train()
    assert loss_row(callback.report).reason.startswith("its forward was replaced on the instance, by ")
