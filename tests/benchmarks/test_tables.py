"""Results survive a file, and tables and charts show them."""

import re
from dataclasses import replace

import pytest
import torch

from benchmarks import plots, tables
from benchmarks.operator_cases import DIRECTIONS, OperatorCase
from benchmarks.results import Result, Results
from benchmarks.samples import PairedRatio, Timing

COPY = 4e12
CASES = [
    OperatorCase.named(name)
    for name in ("rms_norm 8192x2048", "add_rms_norm 8192x4096", "rms_norm 8192x4096", "qk_norm_rope 16384x(32+8)x128")
]
FRACTIONS = {"stock": 0.1, "quack": 0.8, "fused": 0.9}
ROW = "Qwen3-0.6B 4x4096"


def seconds(value):
    return Timing(value, 0.99 * value, 1.01 * value, 9, "graph")


def kernel(case, provider, direction):
    moved = case.bytes(direction, torch.bfloat16)
    time = moved / COPY / FRACTIONS[provider]
    return Result("kernels", case.name, provider, direction, "bfloat16", timing=seconds(time), bytes=moved)


def copy(moved, time):
    return Result("copy", str(moved), "copy", bytes=moved, timing=seconds(time))


STEPS = [
    Result("models", ROW, "stock", timing=seconds(0.2956), host=seconds(0.02), peak_bytes=2**35),
    Result("models", ROW, "fused", timing=seconds(0.2), peak_bytes=20 * 2**30),
    Result("models", ROW, "liger", verdict="refused", detail="no such patch"),
    Result("features", ROW, "without rope", timing=seconds(0.021), ratio=PairedRatio(1.05, 1.01, 1.08, 30)),
]


@pytest.fixture
def results():
    rows = [copy(2**31, 2**31 / COPY)]
    rows += [kernel(case, provider, direction) for case in CASES for provider in FRACTIONS for direction in DIRECTIONS]
    return Results({"GPU 0": "a GPU"}, rows=[*rows, *STEPS], left_out=["liger: is not installed"])


def cells(text, start):
    """Return the cells of the first line with this beginning."""
    return re.split(r"\s{2,}", next(line for line in text.splitlines() if re.match(rf"{re.escape(start)}\s", line)))


def test_results_survive_a_file_and_what_only_former_runs_have_measured_is_left_out(results, tmp_path):
    path = tmp_path / "results.json"
    results.save(path)
    assert Results.load(path) == results
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    path.write_text(path.read_text().replace('"part": "kernels"', '"profiled": 1e-5, "part": "kernels"'))
    assert Results.load(path) == results


def test_a_report_has_fractions_of_the_fastest_copy_and_what_was_not_timed_with_its_reason(results):
    wrong = replace(results.rows[1], verdict="wrong", detail="relative error 1", timing=None)
    results.rows[1] = wrong
    results.rows += [copy(2**31, 2**31 / COPY / 2), copy(2**20, 2**20)]
    assert results.copy_bandwidth == pytest.approx(2 * COPY), "a slow small one does not count"
    text = tables.describe(results)
    assert cells(text, "rms_norm 8192x4096")[1:4] == [".05 / .05", ".40 / .40", "*.45 / *.45"]
    assert cells(text, wrong.row)[1] == "wrong / .05"
    assert f"stock, {wrong.row} bfloat16 forward: wrong, relative error 1" in text
    assert f"liger, {ROW}: refused, no such patch" in text
    assert "liger: is not installed" in text
    assert cells(text, ROW) == [ROW, "295.6", "32.0", "*200.0", "20.0", "-"]
    assert re.search(r"without rope .* 1\.050 +1\.010 to 1\.080 +slower$", text, re.MULTILINE)
    assert re.search(r"28\.1 +27\.8 to 28\.4 +1\.5 .*1\.00e-04 +2\.00e-03 +not finite", text)
    assert "MEAN NOTHING" not in text
    results.meaningless = True
    assert tables.describe(results).startswith("THESE TIMES MEAN NOTHING")
    assert tables.describe(Results({"GPU 0": "a GPU"})) == "GPU 0: a GPU", "nothing measured is no error"


@pytest.mark.slow
def test_charts_are_drawn_of_what_was_measured(results, tmp_path):
    pytest.importorskip("matplotlib")
    written = plots.draw(results, tmp_path)
    assert [path.name for path in written] == ["bandwidth.png", "blocks.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert plots.draw(Results({}), tmp_path) == []
