"""Results survive a file, and tables and charts show them."""

import itertools

import pytest
import torch

from benchmarks import plots, tables
from benchmarks.operator_cases import DIRECTIONS, OperatorCase
from benchmarks.results import Result, Results
from benchmarks.samples import Timing

COPY = 4e12


def copy(moved, time):
    return Result("copy", str(moved), "copy", bytes=moved, timing=Timing.of([time], "graph"))


@pytest.fixture
def results():
    rows = [copy(2**31, 2**31 / COPY)]
    for name, direction in itertools.product(("rms_norm 8192x4096", "qk_norm_rope 16384x(32+8)x128"), DIRECTIONS):
        moved = OperatorCase.named(name).bytes(direction, torch.bfloat16)
        timing = Timing.of([moved / COPY / 0.9], "graph")
        rows.append(Result("kernels", name, "fused", direction, "bfloat16", timing=timing, bytes=moved))
    rows.append(Result("models", "a step", "liger", verdict="refused", detail="no such patch"))
    return Results({"GPU 0": "a GPU"}, rows=rows, left_out=["quack: is not installed"])


def test_results_survive_a_file_and_what_only_former_runs_have_measured_is_left_out(results, tmp_path):
    path = tmp_path / "results.json"
    results.save(path)
    assert Results.load(path) == results
    path.write_text(path.read_text().replace('"part": "kernels"', '"profiled": 1e-5, "part": "kernels"'))
    assert Results.load(path) == results


def test_a_report_has_fractions_of_the_fastest_copy_and_what_was_not_timed_with_its_reason(results):
    results.rows += [copy(2**31, 2**31 / COPY / 2), copy(2**20, 2**20)]
    assert results.copy_bandwidth == pytest.approx(2 * COPY), "a slow small one does not count"
    text = tables.describe(results)
    assert ".45 / .45" in text.replace("*", "")
    assert "liger, a step: refused, no such patch" in text
    assert "quack: is not installed" in text


@pytest.mark.slow
def test_charts_are_drawn_of_what_was_measured(results, tmp_path):
    pytest.importorskip("matplotlib")
    written = plots.draw(results, tmp_path)
    assert [path.name for path in written] == ["bandwidth.png", "blocks.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
