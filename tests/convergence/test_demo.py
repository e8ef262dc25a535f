"""The demo compares three runs, says what it saw, and fails when the fused run is wrong."""

import argparse
import dataclasses
import struct

import pytest
import torch

from fused_norm import apply_fused_norm
from fused_norm.convergence import demo
from fused_norm.convergence.training import TrainingResult
from fused_norm.model_configs import FAMILIES, build


def arguments(*argv):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args([str(arg) for arg in argv])


def result(*losses, norms=None):
    return TrainingResult(losses, norms or losses, seconds_per_step=0.1, memory_bytes=1, memory_measure="none")


def comparison(fused):
    stock, control = result(3.0, 2.0, norms=(1.0, 1.0, 5.0)), result(3.0, 2.001, norms=(1.01, 1.01, 9.0))
    return demo.Comparison("llama", 10, torch.float32, {"norm": 1}, stock, fused, control)


def test_the_demo_trains_compares_and_draws(tmp_path, capsys):
    assert demo.run(arguments("--family", "qwen3", "--steps", 2, "--out", tmp_path / "new" / "folder")) == 0
    out = capsys.readouterr().out
    assert "device: " in out
    assert "Python's standard library; 2 steps of" in out
    layers = (demo.GPU if torch.cuda.is_available() else demo.CPU).overrides.get("num_hidden_layers")
    for kind, count in FAMILIES["qwen3"].sites(layers).items():
        assert f"{count} {kind}" in out
    for word in ("loss", "largest gap", "bound", "step time", "memory", "passed"):
        assert word in out
    png = (tmp_path / "new" / "folder" / "curves.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert width > 400
    assert height > 400


@pytest.mark.parametrize(("factor", "what"), [(1.02, "gradient norm"), (-1.0, "loss")])
def test_a_fused_model_with_wrong_gradients_fails_the_demo(factor, what, tmp_path, capsys, monkeypatch):
    def wrong(model):
        report = apply_fused_norm(model)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.register_hook(lambda gradient: gradient * factor)
        return report

    monkeypatch.setattr(demo, "apply_fused_norm", wrong)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    options = ("--family", "llama", "--steps", 4, "--dtype", "float32", "--text", text, "--out", tmp_path)
    assert demo.run(arguments(*options)) == 1
    assert f"FAILED: the {what} of the fused run leaves" in capsys.readouterr().out


def test_the_bound_is_a_multiple_of_the_control_runs_gap():
    norms = (1.0, 1.0, 5.0)
    within, outside = (comparison(result(3.0, loss, norms=norms)) for loss in (2.007, 2.009))
    assert within.loss.bound == pytest.approx(demo.BOUND * 0.001, rel=1e-2)
    assert within.failure is None
    assert outside.failure.startswith("the loss of the fused run")
    # One step with a spike says nothing about gradients; half of the steps do.
    assert comparison(result(3.0, 2.0, norms=(1.0, 1.0, 50.0))).failure is None
    assert comparison(result(3.0, 2.0, norms=(1.09, 1.09, 5.0))).failure.startswith(
        "the gradient norm of the fused run"
    )


@pytest.mark.parametrize("broken", [result(3.0, float("nan")), result(3.0, 2.0, norms=(1.0, 1.0, float("inf")))])
def test_numbers_that_are_not_finite_fail(broken):
    assert comparison(broken).failure == "the fused run has a loss or gradient that is not finite"
    control = dataclasses.replace(comparison(result(3.0, 2.0, norms=(1.0, 1.0, 5.0))), control=broken)
    assert control.failure == "the control run has a loss or gradient that is not finite"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_control_run_starts_one_rounding_away(dtype):
    model, moved = build("qwen3", seed=0, dtype=dtype), build("qwen3", seed=0, dtype=dtype)
    demo._move_by_one_rounding(moved, 0)
    eps = torch.finfo(dtype).eps
    for (name, a), b in zip(model.named_parameters(), moved.parameters(), strict=True):
        relative = ((b.double() - a.double()) / a.double()).nan_to_num()
        assert relative.abs().max() <= 2 * eps, name
        assert (relative > 0).any(), name
        assert (relative < 0).any(), name


def test_text_that_cannot_be_used_is_one_line_and_exit_code_two(tmp_path, capsys):
    assert demo.run(arguments("--text", tmp_path / "absent.txt", "--out", tmp_path)) == 2
    assert demo.run(arguments("--steps", 0, "--out", tmp_path)) == 2
    occupied = tmp_path / "file"
    occupied.write_text("")
    assert demo.run(arguments("--steps", 1, "--out", occupied)) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert len(lines) == 3
    assert all(line.startswith("fused-norm demo: ") for line in lines)
    assert "absent.txt" in lines[0]
    assert "steps must be at least 1, not 0" in lines[1]
    assert "file" in lines[2]


def test_text_and_dataset_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        arguments("--text", "a.txt", "--dataset", "b")
    assert "not allowed with" in capsys.readouterr().err
