"""``python -m benchmarks`` measures what was asked for, stores it, and fails if a GPU is needed."""

import contextlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks import command, host, kernels, losses, model_cases, models, plots, providers, trainers
from benchmarks.command import main
from benchmarks.loss_providers import LOSS_PROVIDERS
from benchmarks.model_variants import DEFAULT, FEATURES
from benchmarks.results import Results

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("part", ["all", "tune"])
def test_without_a_gpu_nothing_is_timed(part, tmp_path, capsys):
    with mock.patch.object(command, "interpret_without_gpu", return_value=torch.device("cpu")):
        assert main([part, "--out", str(tmp_path / "out")]) == 2
    assert "no GPU, and times of Triton's interpreter mean nothing; --quick" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--providers", "stock,apex"], "no provider 'apex'; there are stock, torch"),
        (["--variants", "eager"], "no variant 'eager'; there are stock, liger"),
        (["kernels", "--rows", "rms_norm *,conv *"], "--rows 'conv *' is no operator and shape, and no model"),
        (["kernels", "--rows", "rms_norm 8x64", "--out", "{}/taken"], "/taken/results.json cannot be written"),
        (["plots", "{}/file"], "/file holds no results of the benchmarks"),
    ],
)
def test_bad_input_is_named(arguments, what, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "results.json").mkdir(parents=True)
    with mock.patch.object(kernels, "measure"):
        assert main(["--quick", "--out", str(tmp_path), *(argument.format(tmp_path) for argument in arguments)]) == 2
    assert what in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "rows", "names", "options"),
    [
        ("kernels", "rms_norm 8x64", {"stock", "torch"}, ["--providers", "stock,torch"]),
        ("losses", "linear_cross_entropy 8x16x32", {"stock", "fused"}, ["--providers", "stock,fused"]),
        ("models", "tiny-llama 1x4", {"stock", "torch"}, ["--variants", "stock,torch"]),
        ("features", "tiny-llama 1x4", {"stock", "fused"}, ["--variants", "stock,fused"]),
        ("host", None, {"stock"}, ["--providers", "stock"]),
    ],
)
def test_a_quick_run_leaves_results_and_tables_from_which_plots_makes_the_same_again(
    part, rows, names, options, tmp_path, capsys
):
    first, again = tmp_path / "first", tmp_path / "again"
    chosen = ["--rows", rows] if rows else []
    with mock.patch.object(plots, "draw", return_value=[]):
        assert main([part, *chosen, *options, "--quick", "--out", str(first)]) == 0
        printed = capsys.readouterr().out
        assert main(["plots", str(first / "results.json"), "--out", str(again)]) == 0
    assert "THESE TIMES MEAN NOTHING" in printed
    assert (again / "report.txt").read_bytes() == (first / "report.txt").read_bytes()
    results = Results.load(first / "results.json")
    assert {(row.by, row.verdict) for row in results.of(part)} == {(name, "ok") for name in names}
    assert {row.row in printed for row in results.of(part)} == {True}
    assert rows is None or {row.row for row in results.of(part)} == {rows}
    assert {"torch", "clocks at first", "clocks at last", "options"} <= results.environment.keys()


def test_all_that_can_be_measured_is_measured_for_everyone_and_rows_by_pattern_or_name(tmp_path):
    with contextlib.ExitStack() as stack:
        parts = (losses, kernels, models, host, trainers)
        calls = {part: stack.enter_context(mock.patch.object(part, "measure")).call_args_list for part in parts}
        assert main(["--quick", "--out", str(tmp_path)]) == 0
        rows = "L*B lora 4*,tiny-llama loss lora 2x8"
        assert main(["models", "--rows", rows, "--quick", "--out", str(tmp_path)]) == 0
        rows = "SFT *lora 4*,DPO tiny-llama lora padded 2x8"
        assert main(["trainers", "--rows", rows, "--quick", "--out", str(tmp_path)]) == 0
    measured = [([case.name for case in call.args[1]], [*call.args[2]]) for call in calls[models]]
    assert measured == [
        ([case.name for case in model_cases.DEFAULT], [*DEFAULT]),
        ([case.name for case in model_cases.FEATURES], [*FEATURES]),
        (["Llama-3.2-1B lora 4x4096", "tiny-llama lora loss 2x8"], [*DEFAULT]),
    ]
    for part, known in ((losses, LOSS_PROVIDERS), (kernels, providers.PROVIDERS)):
        assert [provider.name for provider in calls[part][0].args[-1]] == [*known]
    assert len(calls[host]) == 1
    assert [[case.name for case in call.args[1]] for call in calls[trainers]] == [
        [case.name for case in trainers.CASES],
        ["SFT Qwen3-0.6B lora 4x4096", "SFT Qwen3-0.6B lora 4x1024", "DPO tiny-llama lora padded 2x8"],
    ]
    assert {call.args[2] == [*trainers.DEFAULT] for call in calls[trainers]} == {True}


def test_a_fused_result_that_is_wrong_fails_the_run(tmp_path):
    stock = providers.PROVIDERS["stock"].build
    wrong = replace(providers.FUSED, build=lambda case: lambda *inputs: tuple(1.1 * y for y in stock(case)(*inputs)))
    with mock.patch.dict(providers.EVERY, fused=wrong):
        arguments = ["kernels", "--quick", "--providers", "fused", "--rows", "rms_norm 8x64", "--out", str(tmp_path)]
        assert main(arguments) == 1


@pytest.mark.slow
def test_processes_of_torchrun_measure_a_sharded_model_together(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "benchmarks"]
    options = ["--rows", "tiny-llama fsdp2 loss 1x8", "--variants", "stock,fused", "--dtype", "float32", "--quick"]
    subprocess.run([*launcher, "models", *options, "--out", str(tmp_path)], cwd=ROOT, check=True, timeout=300)
    rows = Results.load(tmp_path / "results.json").of("models")
    assert [(row.by, row.verdict, row.timing.samples) for row in rows] == [("stock", "ok", 1), ("fused", "ok", 1)]
    assert all(row.error < 1e-5 for row in rows)
