"""``fused-norm bench`` measures what was asked for, keeps it, and says no where a GPU is needed."""

from __future__ import annotations

import json
import re

import pytest
import torch

from fused_norm.bench import models, providers
from fused_norm.bench.results import Results
from fused_norm.cli import bench_command as bench
from fused_norm.cli import main


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(bench, "interpret_without_gpu", lambda: torch.device("cpu"))


def test_without_a_gpu_nothing_is_timed(without_gpu, tmp_path, capsys):
    assert main(["bench", "--out", str(tmp_path / "out")]) == 2
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
        (["--widths", "128"], "--widths belongs to --tune"),
        (["--tune", "--widths", "64,12x"], "--widths takes numbers from 1 on, not 64,12x"),
    ],
)
def test_what_there_is_not_is_named(arguments, what, tmp_path, capsys):
    assert main(["bench", "--quick", "--out", str(tmp_path), *arguments]) == 2
    assert what in capsys.readouterr().err


def test_a_quick_run_leaves_results_tables_and_pictures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "first"
    chosen = ["--providers", "stock,fused", "--variants", "stock,fused"]
    for part, rows in (("kernels", "norm 8x64"), ("models", "tiny-qwen3*")):
        assert main(["bench", part, "--quick", "--rows", rows, *chosen, "--out", str(out / part)]) == 0
        printed = capsys.readouterr()
        assert "THESE TIMES MEAN NOTHING" in printed.out
        assert rows.rstrip("*") in printed.out
        assert " s] " in printed.err
    results = Results.load(out / "kernels" / "results.json")
    assert {(row.case, row.provider, row.verdict) for row in results.kernels} == {
        ("norm 8x64", "stock", "ok"),
        ("norm 8x64", "fused", "ok"),
    }
    assert torch.__version__.startswith(results.environment["torch"])
    assert len(results.copies) == 4, "one at each end, and one for each direction"
    assert (out / "kernels" / "bandwidth-dark.png").exists()

    again = tmp_path / "again"
    assert main(["bench", "--plot", str(out / "kernels" / "results.json"), "--out", str(again)]) == 0
    for name in ("report.txt", "bandwidth-light.png"):
        assert (again / name).read_bytes() == (out / "kernels" / name).read_bytes()


def test_help_names_every_variant(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    named = set(re.split(r"[^a-z0-9-]+", re.sub(r"-\s+", "-", capsys.readouterr().out)))
    assert set(models.VARIANTS) <= named


def test_a_fused_result_that_is_wrong_fails_the_run(tmp_path, monkeypatch):
    right = providers.FUSED.build
    wrong = providers.Provider("fused", lambda case: lambda *given: tuple(1.1 * y for y in right(case)(*given)))
    monkeypatch.setitem(providers.PROVIDERS, "fused", wrong)
    assert main(["bench", "kernels", "--quick", "--rows", "norm 8x64", "--out", str(tmp_path)]) == 1


@pytest.mark.parametrize("text", [None, "{}"])
def test_results_that_cannot_be_read_are_named(text, tmp_path, capsys):
    path = tmp_path / "results.json"
    if text is not None:
        path.write_text(text)
    assert main(["bench", "--plot", str(path), "--out", str(tmp_path)]) == 2
    assert "results.json" in capsys.readouterr().err


def test_tuning_prints_a_table(tmp_path, capsys):
    assert main(["bench", "--tune", "--quick", "--widths", "64", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "ForwardPlan(" in printed
    assert "BackwardPlan(" in printed
    assert (tmp_path / "plans.txt").read_text() == printed


def test_the_options_are_kept_with_the_results(tmp_path):
    main(["bench", "kernels", "--quick", "--rows", "norm 8x64", "--providers", "stock", "--out", str(tmp_path)])
    kept = json.loads((tmp_path / "results.json").read_text())["environment"]["options"]
    assert "rows ['norm 8x64']" in kept
