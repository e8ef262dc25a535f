"""What the command compares, which runs it shares and finds again, and the text of them; no model is trained."""

import importlib.metadata
import json
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fused_norm import FusedNormError
from fused_norm.cli import main
from fused_norm.convergence.plan import code_digest
from fused_norm.convergence.suite import fused_for
from fused_norm.model_configs import FAMILIES, build

from .runs import results_in
from .test_verdict import CALLS, CONTROL, CONTROLS, PARAMETERS, STOCK, run_record

LLAMA = ("llama", "--dtype", "bf16")


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Return a function that runs the command on these records; it returns the rows and what would be trained."""

    def run(*line, fused=CONTROL, further=None, calls=CALLS, on_stock=lambda: STOCK, run_fused=None):
        trained = []
        run_fused = run_fused or (lambda: SimpleNamespace(record=fused, not_seen=()))

        @dataclass(frozen=True)
        class Trainer:
            plan: Any
            comparison: Any

            def check(self, fused, in_half):
                return calls

            def train(self, change=None, on_step=None):
                trained.append((self, "fused" if change else "stock"))
                return run_fused() if change else SimpleNamespace(record=on_stock(), not_seen=())

            def train_control(self, index, on_step=None):
                trained.append((self, index))
                return SimpleNamespace(record=CONTROLS[min(index, 1)] if index < 4 else further)

        monkeypatch.setattr("fused_norm.convergence.suite.PairedRuns", Trainer)
        monkeypatch.setattr("fused_norm.convergence.suite.record_run", lambda run, stock: run.record)
        main(["converge", "--device", "cpu", "--out", str(tmp_path), *line])
        return results_in(tmp_path), trained

    return run


def fails():
    raise FusedNormError("no model is built")


@pytest.mark.parametrize("tier", ["quick", "full"])
def test_every_family_runs_in_every_precision_and_one_runs_everything(tier, command):
    rows, _ = command("--tier", tier, on_stock=fails)
    planned = [row["comparison"] for row in rows.values()]
    families = {entry["model"] for entry in planned}
    assert {"qwen3", "llama", "gemma3_text", "olmo3", "glm4"} <= families <= set(FAMILIES)
    every = {(family, precision) for family in families for precision in ("fp32", "mixed", "bf16")}
    assert {(entry["model"], entry["precision"]) for entry in planned} == every
    wide = [entry for entry in planned if entry["model"] == "qwen3"]
    executions = {"eager", "compile", "checkpointing", "recompute", "loss", "log-probs", "lora", "qlora"}
    assert executions < {entry["execution"] for entry in wide}
    assert {entry["feature"] for entry in wide if entry["precision"] == "bf16"} == KINDS.keys()


def test_an_axis_that_is_named_is_taken_in_full_and_linears_of_4_bits_are_trained_under_autocast_alone(command):
    line = "llama --dtype fp32 --dtype mixed --axis lora --axis qlora --seeds 2"
    rows, _ = command(*line.split(), on_stock=fails)
    ways = ("fp32.lora", "mixed.lora", "mixed.qlora")
    assert rows.keys() == {f"llama.{how}.all.seed{seed}" for how in ways for seed in (0, 1)}


KINDS = {
    "norms": {"norm"},
    "norms+qk": {"norm", "qk"},
    "norms+rope": {"norm", "qk", "rope"},
    "norms+residual": {"norm", "residual"},
    "norms+mlp": {"norm", "mlp"},
    "norms+loss": {"norm", "loss"},
    "all": {"norm", "qk", "rope", "residual", "mlp", "loss"},
}


def test_features_fuse_their_kinds_of_sites_and_no_others():
    for feature, kinds in KINDS.items():
        with fused_for(feature)(build("qwen3", seed=0)) as sites:
            assert {site.kind for site in sites} - {"shared_inputs"} == kinds, feature


def test_what_the_fused_model_alone_does_is_compared_with_the_runs_of_the_eager_one(command):
    axes = [f"--axis={execution}" for execution in ("eager", "recompute", "loss", "lora", "lora-recompute")]
    rows, trained = command(*LLAMA, *axes)
    assert [at.comparison.execution for at, run in trained if run == "stock"] == ["eager", "loss", "lora"]
    assert len([run for _, run in trained if run == "fused"]) == len(rows) == 5


def test_text_is_cut_into_full_sequences_that_all_come_before_any_again_in_the_order_of_a_seed(command, tmp_path):
    (tmp_path / "text").write_text("abcdé\nxaaabaabcefghijklmnopyz", encoding="utf-8")
    _, trained = command(*LLAMA, "--data", str(tmp_path / "text"), "--length", "4", "--steps", "7", "--seeds", "2")
    plan = trained[0][0].plan
    text = [bytes(row.tolist()) for row in plan.tokens["llama"]]
    assert text == [b"abcd", b"\xc3\xa9\nx", b"aabc", b"efgh", b"ijkl", b"mnop"], "one letter is most of aaab"
    orders = [plan.sequences(at.comparison) for at, run in trained if run == "stock"]
    for order in orders:
        drawn = [bytes(row.tolist()) for row in order]
        assert len(drawn) == 14
        assert sorted(drawn[:6]) == sorted(drawn[6:12]) == sorted(text)
    assert not torch.equal(*orders)
    assert torch.equal(plan.sequences(trained[0][0].comparison), orders[0])


def test_a_result_is_found_again_as_it_was_only_for_the_same_options_code_and_versions(command, tmp_path, monkeypatch):
    lost = replace(CONTROL, losses=(5.0, math.nan, 1.0), gradients=dict.fromkeys(PARAMETERS, math.inf))
    calls = replace(CALLS, not_seen=("norm (norm)",))
    first, trained = command(*LLAMA, fused=lost, calls=calls)
    assert len(trained) == 6
    again, trained = command(*LLAMA)
    assert not trained
    assert json.dumps(again) == json.dumps(first)
    (path,) = (tmp_path / "comparisons").iterdir()
    assert path.suffix == ".json"
    for change in (["--again"], ["--learning-rate", "1e-4"]):
        assert command(*LLAMA, *change)[1], change
    command(*LLAMA)
    path.write_text(path.read_text()[:100])
    assert command(*LLAMA)[1]
    version = importlib.metadata.version
    for name, other in (
        ("fused_norm.convergence.plan.code_digest", lambda folder: "other"),
        ("importlib.metadata.version", lambda package: "9" if package == "triton" else version(package)),
    ):
        assert not command(*LLAMA)[1]
        with monkeypatch.context() as patched:
            patched.setattr(name, other)
            assert command(*LLAMA)[1], name
        command(*LLAMA)


def test_code_that_changed_has_another_digest(tmp_path):
    for name, text in (("one", "x = 1"), ("same", "x = 1"), ("other", "x = 2")):
        (tmp_path / name / "below").mkdir(parents=True)
        (tmp_path / name / "below" / "kernel.py").write_text(text)
    first, same, changed = (code_digest(tmp_path / name) for name in ("one", "same", "other"))
    assert first == same != changed


@pytest.mark.parametrize(
    ("fused", "further", "outcome"),
    [
        (run_record(0.1), run_record(0.05, losses=(5.0, 4.0, 3.01)), "green"),
        (run_record(0.1), run_record(0.02, losses=(5.0, 4.0, 3.01)), "red"),
        (run_record(0.1), run_record(), "red"),  # a control that is the stock run says nothing, and clears nobody
        (run_record(0.02), None, "green"),
    ],
)
def test_a_run_that_is_red_by_noise_alone_is_held_to_three_times_as_many_controls(fused, further, outcome, command):
    rows, trained = command(*LLAMA, "--feature", "all", "--feature", "norms", fused=fused, further=further)
    assert [row["outcome"] for row in rows.values()] == [outcome] * 2
    # Once for all runs that are held to them.
    assert [run for _, run in trained if run not in ("stock", "fused")] == list(range(12 if further else 4))


@pytest.mark.parametrize(
    ("scores", "is_near", "not_seen", "near_ties", "outcome"),
    [
        # In one comparison in bf16, one row of a router had two equal scores, and one of them a last place more, fused.
        ([-0.0146484375, -0.294921875, -0.1220703125, -0.12158203125], True, (), 1, "green"),
        ([-0.0146484375, -0.294921875, -0.1220703125, -0.1162109375], False, (), 0, "red"),
        ([-0.0146484375, -0.294921875, -0.1220703125, -0.12158203125], True, ("model.norm (norm)",), 0, "red"),
    ],
)
def test_a_router_that_decides_a_near_tie_otherwise_is_no_fault(scores, is_near, not_seen, near_ties, outcome, command):
    row = torch.tensor([[-0.0146484375, -0.294921875, -0.1220703125, -0.1220703125]])

    def run_fused():
        values, chosen = torch.topk(torch.tensor([scores]), 2, dim=-1)
        assert values.tolist() == torch.tensor([scores]).gather(-1, chosen).tolist()
        is_like_stock, is_first = chosen.tolist() == [[0, 2]], not fused
        fused.append(is_like_stock)
        record = CONTROL if is_like_stock else run_record(0.1)
        return SimpleNamespace(record=record, not_seen=() if is_first else not_seen)

    def on_stock():
        torch.topk(row, 2, dim=-1)
        return STOCK

    fused, topk = [], torch.topk
    further = run_record(0.02, losses=(5.0, 4.0, 3.01))
    rows, _ = command(*LLAMA, further=further, on_stock=on_stock, run_fused=run_fused)
    (result,) = rows.values()
    assert (result["outcome"], result["fused"]["near_ties"], torch.topk) == (outcome, near_ties, topk)
    assert fused == [False, is_near]
