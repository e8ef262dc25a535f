"""``python -m benchmarks`` measures what was asked for, keeps it, and says no where a GPU is needed."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks import command, host, kernels, losses, model_cases, model_variants, models, plots, providers
from benchmarks.command import main
from benchmarks.loss_cases import CASES as LOSS_CASES
from benchmarks.loss_providers import LOSS_PROVIDERS
from benchmarks.results import Results

ROOT = Path(__file__).parents[2]
SHARDED = ["Qwen3-0.6B fsdp2 4x4096", "Llama-3.2-1B fsdp2 4x4096"]


@pytest.mark.slow
def test_the_package_is_a_command_of_a_checkout():
    found = subprocess.run([sys.executable, "-m", "benchmarks", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.startswith("usage: python -m benchmarks"), found.stderr


def test_a_list_without_names_is_bad_input(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--providers", ","])
    assert end.value.code == 2
    assert "argument --providers: ',' names nothing" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["all", "tune"])
def test_without_a_gpu_nothing_is_timed(part, tmp_path, capsys):
    with mock.patch.object(command, "interpret_without_gpu", return_value=torch.device("cpu")):
        assert main([part, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "no GPU" in said
    assert "--quick" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--providers", "stock,apex"], "no provider 'apex'; there are stock, torch"),
        (["--variants", "eager"], "no variant 'eager'; there are stock, liger"),
        (["--dtype", "float64"], "no dtype 'float64'; there are bfloat16"),
        (
            ["losses", "--providers", "stock,static_persistent"],
            "no provider 'static_persistent'; there are stock, comp",
        ),
        (["kernels", "--providers", "stock,liger-fp32"], "no provider 'liger-fp32'; there are stock, torch"),
        (["losses", "--rows", "linear_cross_entropy 8x8"], "--rows 'linear_cross_entropy 8x8' is no operator"),
        (["kernels", "--rows", "rms_norm *,conv *"], "--rows 'conv *' is no operator and shape, and no model"),
        (["models", "--rows", "add_rms_norm 8x64"], "--rows 'add_rms_norm 8x64' is no"),
        (["--widths", "128"], "--widths belongs to tune"),
        (["plots"], "plots, and nothing else, takes the results.json"),
        (["host", "results.json"], "plots, and nothing else, takes the results.json"),
        (["--out", "{}/file/below"], "/file/below: this folder cannot be made (Not a directory)"),
        (["kernels", "--rows", "rms_norm 8x64", "--out", "{}/taken"], "/taken/results.json cannot be written"),
        (["plots", "{}/none.json"], "/none.json cannot be read (No such file or directory)"),
        (["plots", "{}/file"], "/file holds no results of the benchmarks"),
    ],
)
def test_what_there_is_not_is_named(arguments, what, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "results.json").mkdir(parents=True)
    arguments = [argument.format(tmp_path) for argument in arguments]
    with mock.patch.object(kernels, "measure"):
        assert main(["--quick", "--out", str(tmp_path), *arguments]) == 2
    assert what in capsys.readouterr().err


def test_a_quick_run_leaves_results_tables_and_pictures(tmp_path, capsys):
    with mock.patch.object(plots, "draw", side_effect=lambda results, folder: [folder / f"{len(results.rows)}.png"]):
        _quick_runs(tmp_path, capsys)


def _quick_runs(tmp_path, capsys):
    out = tmp_path / "first"
    chosen = ["--providers", "stock,torch", "--variants", "stock,torch"]
    for part, rows in (("kernels", "rms_norm 8x64"), ("models", "tiny-llama 1x4")):
        assert main([part, "--quick", "--rows", rows, *chosen, "--out", str(out / part)]) == 0
        printed = capsys.readouterr()
        assert "THESE TIMES MEAN NOTHING" in printed.out
        assert rows in printed.out
        assert " s] " in printed.err
    results = Results.load(out / "kernels" / "results.json")
    assert {(row.row, row.by, row.verdict) for row in results.of("kernels")} == {
        ("rms_norm 8x64", "stock", "ok"),
        ("rms_norm 8x64", "torch", "ok"),
    }
    assert torch.__version__.startswith(results.environment["torch"])
    assert len(results.of("copy")) == 4, "one at each end, and one for each direction"
    assert "rows ['rms_norm 8x64']" in results.environment["options"]
    assert {"clocks at first", "clocks at last", "LIGER_KERNEL_IMPL"} <= results.environment.keys()
    steps = (out / "models" / "steps.md").read_text(encoding="utf-8").splitlines()
    assert (steps[0], steps[2].partition(" | ")[0]) == ("| step | stock ms | torch ms |", "| tiny-llama 1x4")

    again = tmp_path / "again"
    assert main(["plots", str(out / "kernels" / "results.json"), "--out", str(again)]) == 0
    assert (again / "report.txt").read_bytes() == (out / "kernels" / "report.txt").read_bytes()
    if importlib.util.find_spec("matplotlib"):
        assert f"report.txt, {len(results.rows)}.png" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "arguments", "rows", "variants"),
    [
        ("models", [], [case.name for case in model_cases.DEFAULT], list(model_variants.DEFAULT)),
        (
            "models",
            ["--rows", "L*B lora 4*,L*B lora loss 4*,[QL]* fsdp2 4*"],
            ["Llama-3.2-1B lora 4x4096", "Llama-3.2-1B lora loss 4x4096", *SHARDED],
            None,
        ),
        ("models", ["--rows", "tiny-llama loss lora 2x8"], ["tiny-llama lora loss 2x8"], None),
        ("models", ["--variants", "fused-compile,stock"], None, ["stock", "fused-compile"]),
        ("features", [], [case.name for case in model_cases.FEATURES], list(model_variants.FEATURES)),
        ("features", ["--variants", "stock"], None, ["fused", "stock"]),
    ],
)
def test_of_models_most_rows_and_variants_are_measured_by_name_alone(part, arguments, rows, variants, tmp_path):
    with mock.patch.object(models, "measure") as measure:
        assert main([part, "--quick", "--out", str(tmp_path), *arguments]) == 0
    _, cases, found, _, *_ = measure.call_args.args
    assert rows is None or [case.name for case in cases] == rows
    assert list(found) == (variants or list(model_variants.DEFAULT))


def test_any_shape_can_be_measured(tmp_path):
    with mock.patch.object(kernels, "measure") as measure:
        rows = "add_rms_norm 3x40,qk_norm 2x(3+1)x8"
        assert main(["kernels", "--quick", "--rows", rows, "--out", str(tmp_path)]) == 0
    assert [case.name for case in measure.call_args.args[1]] == ["add_rms_norm 3x40", "qk_norm 2x(3+1)x8"]


@pytest.mark.parametrize(
    ("part", "given", "of_losses", "of_kernels"),
    [
        ("losses", [], list(LOSS_PROVIDERS), []),
        ("losses", ["--providers", "products,liger-fp32"], ["liger-fp32", "products"], []),
        ("kernels", ["--providers", "liger,fused"], [], ["liger", "fused"]),
        ("all", ["--providers", "torch,liger-fp32"], ["liger-fp32", "torch"], ["torch"]),
    ],
)
def test_losses_and_kernels_have_providers_of_their_own(part, given, of_losses, of_kernels, tmp_path):
    found = {}
    with contextlib.ExitStack() as stack:
        for module in (losses, kernels, models, host):
            found[module] = stack.enter_context(mock.patch.object(module, "measure"))
        assert main([part, "--quick", "--out", str(tmp_path), *given]) == 0
    if of_losses:
        _, cases, dtype, peers = found[losses].call_args.args
        assert ([case.name for case in cases], dtype) == ([case.name for case in LOSS_CASES], torch.bfloat16)
        assert [provider.name for provider in peers] == of_losses
    if of_kernels:
        assert [provider.name for provider in found[kernels].call_args.args[-1]] == of_kernels
    assert (found[losses].called, found[kernels].called) == (bool(of_losses), bool(of_kernels))


def test_after_the_budget_nothing_is_started(tmp_path, capsys):
    assert main(["--quick", "--budget-seconds", "0", "--out", str(tmp_path)]) == 0
    results = Results.load(tmp_path / "results.json")
    assert {row.part for row in results.rows} == {"copy"}
    for part in (
        "host time of rms_norm 16x1024 by stock",
        "models: Qwen3-0.6B lora checkpointing 4x4096",
        "features: ",
        "rms_norm 8192x4096 bf",
        "linear_cross_entropy 16384x1024x151936 bf",
    ):
        assert any(line.startswith(part) and line.endswith("after 0 s") for line in results.left_out)
    assert "Left out:" in capsys.readouterr().out


def test_a_fused_result_that_is_wrong_fails_the_run(tmp_path):
    stock = providers.PROVIDERS["stock"].build
    wrong = replace(providers.FUSED, build=lambda case: lambda *given: tuple(1.1 * y for y in stock(case)(*given)))
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
