"""The suite on tiny models: every family is green, every planted fault is caught where it was planted, work is kept."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fused_norm
from fused_norm.cli import main
from fused_norm.convergence import data, figures, page, plan, report, suite
from fused_norm.convergence.mutations import MUTATIONS
from fused_norm.convergence.store import Store
from fused_norm.convergence.subject import of_family
from fused_norm.model_configs import FAMILIES


class Silent:
    def __init__(self):
        self.runs, self.kept = [], []

    def run(self, name, steps):
        self.runs.append(name)
        return lambda step, loss: None

    def done(self, result, *, kept):
        self.kept.append(kept)


def tiny_plan(cases, **changes):
    settings = plan.TIERS["quick"].settings
    options = dataclasses.replace(settings.options, steps=2, warmup_steps=1)
    settings = dataclasses.replace(settings, options=options, controls=3)
    packed = data.varied(data.pack(data.read_files(data.standard_library()[:4]), length=settings.length, limit=16))
    whole = suite.Plan(
        cases=tuple(cases),
        subjects={case.model: of_family(case.model, {}) for case in cases},
        settings=settings,
        mutation_steps=2,
        sequences=lambda case: data.schedule(packed, count=8, seed=case.seed),
        facts={"data": 1},
        cpu=not torch.cuda.is_available(),
    )
    return dataclasses.replace(whole, **changes)


def results_in(folder):
    return {row["name"]: row for row in json.loads((folder / "report.json").read_text())["results"]}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3"])
def test_the_quick_tier_is_green(family, tmp_path):
    assert main(["converge", family, "--out", str(tmp_path)]) == 0
    assert {row["outcome"] for row in results_in(tmp_path).values()} == {"green"}


def test_every_fault_in_a_model_with_every_kind_of_site_is_caught_where_it_was_planted(tmp_path):
    assert main(["converge", "gemma3_text", "--out", str(tmp_path), "--dtype", "bf16", "--mutations"]) == 0
    rows = results_in(tmp_path)
    for name in MUTATIONS:
        row = rows[f"gemma3_text.bf16.eager.all.seed0.{name}"]
        assert row["outcome"] == "caught"
        layer = re.match(r".*\.\d+(?=\.)", row["planted"][0])[0]
        assert row["divergence"].startswith(f"{layer}, ")


def test_the_quick_tier_covers_features_and_executions(tmp_path):
    assert main(["converge", "qwen3", "--out", str(tmp_path)]) == 0
    cases = [row["case"] for row in results_in(tmp_path).values()]
    assert {case["execution"] for case in cases} == set(plan.EXECUTIONS)
    assert {case["feature"] for case in cases} == set(plan.FEATURES)


@pytest.mark.parametrize("precision", plan.PRECISIONS)
def test_faults_are_caught_in_every_precision_that_shows_them(precision):
    results = list(suite.run(tiny_plan(suite.with_mutations([plan.Case("qwen3", precision)])), None, Silent()))
    outcomes = {result.case.mutation: result.outcome for result in results}
    assert outcomes.pop("none") == "green"
    assert outcomes.pop("casting") == ("hidden" if precision == "fp32" else "caught")
    assert set(outcomes.values()) == {"caught"}
    assert report.exit_code(results) == 0


def test_what_was_finished_is_found_again_and_what_changed_is_run_again(tmp_path):
    cases = [plan.Case("llama", "fp32"), plan.Case("llama", "fp32", feature="norms")]
    first, second, third = Silent(), Silent(), Silent()
    assert len(list(suite.run(tiny_plan(cases[:1]), Store(tmp_path), first))) == 1
    both = list(suite.run(tiny_plan(cases), Store(tmp_path), second))
    assert second.runs == ["stock", "control 0", "control 1", "control 2", "fused norms"]
    assert second.kept == [True, False]
    assert [result.outcome for result in both] == ["green", "green"]
    list(suite.run(tiny_plan(cases, facts={"data": 2}), Store(tmp_path), third))
    assert third.kept == [False, False]


def test_kernels_that_do_not_run_are_noticed():
    with fused_norm.disabled():
        (result,) = suite.run(tiny_plan([plan.Case("llama", "bf16", feature="norms")]), None, Silent())
    assert result.outcome == "invalid"
    assert "and 4 other norms ran stock code in the fused run" in result.verdict.reasons[0]


def test_a_fused_model_may_be_the_stock_model_to_the_last_bit():
    (result,) = suite.run(tiny_plan([plan.Case("gemma", "bf16", feature="norms")]), None, Silent())
    assert result.outcome == "green"


def test_a_model_that_fails_leaves_the_others_alone(tmp_path, monkeypatch):
    build = of_family("gemma", {}).__class__.build

    def fail(self, **named):
        if self.name == "llama":
            raise RuntimeError("out of luck")
        return build(self, **named)

    monkeypatch.setattr("fused_norm.convergence.subject.Subject.build", fail)
    cases = [plan.Case("llama", "fp32"), plan.Case("gemma", "fp32")]
    broken, fine = suite.run(tiny_plan(cases), Store(tmp_path), Silent())
    assert (broken.outcome, fine.outcome) == ("invalid", "green")
    assert broken.verdict.reasons == ("RuntimeError: out of luck",)
    assert Store(tmp_path).load(broken.case, tiny_plan(cases).settings_of(broken.case)) is None
    table = report.table([broken, fine])
    assert "out of luck" in table
    assert report.exit_code([broken, fine]) == 2


def test_the_report_is_one_page_one_picture_and_one_table(tmp_path):
    cases = [plan.Case("llama", "bf16")]
    whole = tiny_plan([*cases, *suite.with_mutations(cases)[:2]])
    results = list(suite.run(whole, None, Silent()))
    html = page.render(results, {"torch": torch.__version__, "<odd>": "&"})
    assert html.count("<svg") == html.count("</svg>") == 3
    assert "&lt;odd&gt;" in html
    assert not re.search(r"(src|href)=|@import|url\(", html)
    assert "prefers-color-scheme: dark" in html
    for text in ("llama.bf16.eager.all.seed0", "caught", "model.layers.1", "rms over steps"):
        assert text in html
    figures.draw(results, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    table = report.table(results)
    assert "planted fault" in table
    assert "green" in table
    kept = json.loads(report.as_json(results, {}))
    assert kept["exit_code"] == 0
    assert kept["results"][0]["checks"]


SHARDED = """
import sys
from torch.distributed.tensor import DTensor
from fused_norm.convergence import runs
train = runs.train
def checked(model, *arguments, on_gradients, **named):
    def watch(step, trained):
        kinds = {type(parameter) is not DTensor and "plain" or "sharded" for parameter in trained.parameters()}
        print("parameters:", type(trained).__name__, *sorted(kinds), flush=True)
        on_gradients(step, trained)
    return train(model, *arguments, on_gradients=watch, **named)
runs.train = checked
from fused_norm.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("launcher", "evidence"),
    [
        (["--multi_gpu"], "parameters: DistributedDataParallel plain"),
        (["--use_fsdp", "--fsdp_version", "2"], "parameters: FSDPLlamaForCausalLM sharded"),
    ],
    ids=["ddp", "fsdp2"],
)
def test_two_processes_come_to_the_same_verdict(launcher, evidence, tmp_path):
    script = tmp_path / "converge.py"
    script.write_text(SHARDED)
    environment = os.environ | {
        "PYTHONPATH": str(Path(fused_norm.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
    }
    # Accelerate's own --cpu starts one process; these flags start two, which find no GPU and take gloo.
    command = [sys.executable, "-m", "accelerate.commands.launch", *launcher, "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command += [script, "converge", "llama", "--dtype", "bf16", "--steps", "3", "--out", tmp_path / "out"]
    found = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]
    assert "2 processes" in found.stdout
    assert evidence in found.stdout
    assert results_in(tmp_path / "out")["llama.bf16.eager.all.seed0"]["outcome"] == "green"
