"""``fused-norm bench`` measures what was asked for, keeps it, and says no where a GPU is needed."""

from __future__ import annotations

import json
import re

import pytest
import torch

from benchmarks import command as bench
from benchmarks import features, model_variants, models, operator_timings, providers
from benchmarks.command import main
from benchmarks.results import Results


def test_a_list_without_names_is_bad_input(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--providers", ","])
    assert end.value.code == 2
    assert "argument --providers: ',' names nothing" in capsys.readouterr().err


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(bench, "interpret_without_gpu", lambda: torch.device("cpu"))


def test_without_a_gpu_nothing_is_timed(without_gpu, tmp_path, capsys):
    assert main(["--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "no GPU" in said
    assert "--quick" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--providers", "stock,apex"], "no provider 'apex'; there are stock, torch"),
        (["--variants", "eager"], "no variant 'eager'"),
        (["--dtype", "float64"], "no dtype 'float64'; there are bfloat16"),
        (["kernels", "--rows", "norm *,conv *"], "--rows 'conv *' matches none of: norm"),
        (["--shapes", "norm 8x64"], "--shapes belongs to `bench kernels` and `bench modes`"),
        (["kernels", "--shapes", "norm 8x64", "--rows", "norm *"], "--shapes belongs to"),
        (["kernels", "--shapes", "conv 8x64"], "--shapes: 'conv 8x64' is no operator and shape"),
        (["modes", "--shapes", "add 8x64"], "--shapes 'add 8x64': modes are compared on norm and gemma"),
        (["--out", "{}/file/below"], "/file/below: this folder cannot be made (Not a directory)"),
        (["kernels", "--rows", "norm 8x64", "--out", "{}/taken"], "/taken/results.json cannot be written"),
        (["--plot", "{}/none.json"], "/none.json cannot be read (No such file or directory)"),
    ],
)
def test_what_there_is_not_is_named(arguments, what, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "results.json").mkdir(parents=True)
    arguments = [argument.format(tmp_path) for argument in arguments]
    assert main(["--quick", "--out", str(tmp_path), *arguments]) == 2
    assert what in capsys.readouterr().err


def test_a_quick_run_leaves_results_tables_and_pictures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "first"
    chosen = ["--providers", "stock,fused", "--variants", "stock,fused"]
    for part, rows in (("kernels", "norm 8x64"), ("models", "tiny-qwen3 1x16")):
        assert main([part, "--quick", "--rows", rows, *chosen, "--out", str(out / part)]) == 0
        printed = capsys.readouterr()
        assert "THESE TIMES MEAN NOTHING" in printed.out
        assert rows in printed.out
        assert " s] " in printed.err
    results = Results.load(out / "kernels" / "results.json")
    assert {(row.case, row.provider, row.verdict) for row in results.kernels} == {
        ("norm 8x64", "stock", "ok"),
        ("norm 8x64", "fused", "ok"),
    }
    assert torch.__version__.startswith(results.environment["torch"])
    assert len(results.copies) == 4, "one at each end, and one for each direction"
    assert (out / "kernels" / "bandwidth-dark.png").exists()
    steps = (out / "models" / "steps.md").read_text(encoding="utf-8").splitlines()
    assert (steps[0], steps[2].partition(" | ")[0]) == ("| | stock | fused |", "| tiny-qwen3 1x16")
    facts = Results.load(out / "models" / "results.json").environment
    assert {"clocks at first", "clocks at last", "LIGER_KERNEL_IMPL"} <= facts.keys()

    again = tmp_path / "again"
    assert main(["--plot", str(out / "kernels" / "results.json"), "--out", str(again)]) == 0
    for name in ("report.txt", "bandwidth-light.png"):
        assert (again / name).read_bytes() == (out / "kernels" / name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "rows", "variants"),
    [
        ([], ["tiny-qwen3 1x16", "tiny-gemma3_text 1x16"], list(model_variants.DEFAULT)),
        (["--rows", "* lora *,* generate 1*"], ["tiny-qwen3 lora 1x16", "tiny-qwen3 generate 1x2"], None),
        (["--variants", "fused-compile,stock"], None, ["stock", "fused-compile"]),
    ],
)
def test_of_models_most_rows_and_variants_are_measured_by_name_alone(arguments, rows, variants, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(models, "measure", lambda run, cases, variants, dtype: asked.append((cases, variants)))
    assert main(["models", "--quick", "--out", str(tmp_path), *arguments]) == 0
    ((cases, found),) = asked
    assert rows is None or [case.name for case in cases] == rows
    assert found == (variants or list(model_variants.DEFAULT))


def test_help_names_every_variant(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    help_text = re.sub(r"\s+", " ", re.sub(r"-\s+", "-", capsys.readouterr().out))
    for part, variants in (("models", model_variants.VARIANTS), ("features", features.VARIANTS)):
        listed = re.search(rf"of {part}: ([^;]*?)( \(default|;)", help_text)[1]
        assert [re.sub(r" \(.*", "", name) for name in listed.split(", ")] == list(variants)


@pytest.mark.parametrize(
    ("part", "option", "profiled"),
    [("kernels", [], True), ("kernels", ["--no-profiler"], False), ("modes", ["--dtype", "float32"], True)],
)
def test_the_profiler_can_be_left_out(part, option, profiled, tmp_path):
    chosen = ["--providers", "stock", "--out", str(tmp_path), *(["--rows", "norm 8x64"] if part == "kernels" else [])]
    assert main([part, "--quick", *chosen, *option]) == 0
    rows = Results.load(tmp_path / "results.json").kernels
    assert {row.profiled is not None for row in rows} == {profiled}


def test_after_the_budget_nothing_is_started(tmp_path, capsys):
    assert main(["--quick", "--budget-seconds", "0", "--out", str(tmp_path)]) == 0
    results = Results.load(tmp_path / "results.json")
    assert not any((results.kernels, results.host, results.steps, results.features))
    for part in ("host time of norm by stock", "tiny-qwen3 1x16 stock", "features of tiny-", "norm 8x64 bfloat16"):
        assert any(line.startswith(part) and line.endswith("after 0 s") for line in results.left_out)
    assert "Left out:" in capsys.readouterr().out


@pytest.mark.slow
def test_features_are_measured_and_a_wrong_one_fails_the_run(tmp_path, capsys, monkeypatch):
    chosen = ["--rows", "tiny-qwen3 generate *", "--variants", "stock", "--out", str(tmp_path)]
    assert main(["features", "--quick", *chosen]) == 0
    assert "tiny-qwen3 generate 1x2" in capsys.readouterr().out
    rows = Results.load(tmp_path / "results.json").features
    assert [(row.variant, row.verdict) for row in rows] == [("all", "ok"), ("stock", "ok")]
    monkeypatch.setattr(features, "ALLOWED_ERROR", -1.0)
    assert main(["features", "--quick", *chosen]) == 1


def test_a_fused_result_that_is_wrong_fails_the_run(tmp_path, monkeypatch):
    right = providers.FUSED.build
    wrong = providers.Provider("fused", lambda case: lambda *given: tuple(1.1 * y for y in right(case)(*given)))
    monkeypatch.setitem(providers.PROVIDERS, "fused", wrong)
    assert main(["kernels", "--quick", "--rows", "norm 8x64", "--out", str(tmp_path)]) == 1


@pytest.mark.parametrize("text", [None, "{}"])
def test_results_that_cannot_be_read_are_named(text, tmp_path, capsys):
    path = tmp_path / "results.json"
    if text is not None:
        path.write_text(text)
    assert main(["--plot", str(path), "--out", str(tmp_path)]) == 2
    assert "results.json" in capsys.readouterr().err


def test_any_shape_can_be_measured(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(operator_timings, "measure", lambda run, part, cases, *rest, **options: asked.extend(cases))
    for part, shapes in (("kernels", "add 3x40,qk 2x(3+1)x8"), ("modes", "gemma 3x40")):
        assert main([part, "--quick", "--shapes", shapes, "--out", str(tmp_path)]) == 0
    assert [case.name for case in asked] == ["add 3x40", "qk 2x(3+1)x8", "gemma 3x40"]
    assert [case.backward for case in asked] == [True, True, False]


def test_the_options_are_kept_with_the_results(tmp_path):
    main(["kernels", "--quick", "--rows", "norm 8x64", "--providers", "stock", "--out", str(tmp_path)])
    kept = json.loads((tmp_path / "results.json").read_text())["environment"]["options"]
    assert "rows ['norm 8x64']" in kept
